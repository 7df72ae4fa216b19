"""A graph that is written and read again is the same graph, whatever its values are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from lowering.graph_modules import with_code
from npu_iree.graph_bytes import graph_bytes, graph_from_bytes


def _of_constants(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0])


def _of_several(x: torch.Tensor) -> list[torch.Tensor]:
    values, places = x.max(dim=1)
    return [values, places, *x.split(2)]


def _at_an_offset(x: torch.Tensor) -> torch.Tensor:
    return x[2:, 1:].t().exp()


def _of_no_elements(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:0], x[1:]])


def _conjugated(x: torch.Tensor) -> torch.Tensor:
    return (torch.complex(x, x).conj() * x).real


def _of_bytes_and_halves(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).to(torch.bfloat16).expand(3, 4, 4).sum(dtype=torch.float64)


_FUNCTIONS = [
    _of_constants,
    _of_several,
    _at_an_offset,
    _of_no_elements,
    _conjugated,
    _of_bytes_and_halves,
]


@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
@pytest.mark.parametrize("function", _FUNCTIONS, ids=lambda f: f.__name__)
def test_it_is_the_same(function: Callable[..., Any], tracing: Any) -> None:
    x = torch.randn(4, 4)
    traced = make_fx(function, tracing_mode=tracing)(x)
    for node in traced.graph.nodes:
        node.meta["stack_trace"] = f"the line of {node.name}"
        node.meta["original_aten"] = node.target if node.op == "call_function" else None
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    read = graph_from_bytes(graph_bytes(traced), fake_mode)
    assert list(map(_told, read.graph.nodes)) == list(map(_told, traced.graph.nodes))
    values = [v for n in read.graph.nodes for v in pytree.tree_leaves(n.meta.get("val"))]
    assert all(v.fake_mode is fake_mode for v in values if isinstance(v, FakeTensor))
    torch.testing.assert_close(with_code(read)(x), function(x), rtol=0, atol=0)


def test_a_value_of_two_nodes_is_one() -> None:
    traced = make_fx(torch.exp, tracing_mode="fake")(torch.randn(3))
    for node in traced.graph.nodes:
        node.meta["val"] = next(iter(traced.graph.nodes)).meta["val"]
    read = graph_from_bytes(graph_bytes(traced), FakeTensorMode(shape_env=ShapeEnv()))
    assert len({id(node.meta["val"]) for node in read.graph.nodes}) == 1


def _told(node: fx.Node) -> object:
    values = [_layout(value) for value in pytree.tree_leaves(node.meta.get("val"))]
    arguments = str(node.args), str(node.kwargs), [n.name for n in node.all_input_nodes]
    origin = node.meta["stack_trace"], node.meta["original_aten"]
    return node.op, node.name, node.target, arguments, *origin, values


def _layout(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return str(value)
    layout = str(value.shape), str(value.stride()), str(value.storage_offset())
    flags = value.is_conj(), value.is_neg(), value.requires_grad
    return value.dtype, value.device, *layout, *flags

"""One ATen op on real arguments, as a value that can be sent to another process."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from lowering.dtypes import DTYPE_NAMES, DTYPES
from lowering.partition import DEVICE, Segment

PLAIN, SCALAR, EMPTY = "plain", "scalar", "empty"


@dataclass(frozen=True)
class SingleOp:
    """One call of an op.

    Attributes:
        op: its name with overload, e.g. `aten.add.Tensor`.
        key: the call as text, tensors by dtype and rank; equal keys need one test.
        dtypes: of every tensor that goes in or comes out, by importance.
        shape: `empty` if a tensor has no element, else `scalar` if one has no dimension, else
            `plain`.
        source: the program that the call was found in.
        call: the pickled arguments, keyword arguments and results in use.
    """

    op: str
    key: str
    dtypes: tuple[str, ...]
    shape: str
    source: str
    call: bytes

    @cached_property
    def target(self) -> torch._ops.OpOverload:
        """The op itself."""
        space, name, overload = self.op.split(".")
        return getattr(getattr(getattr(torch.ops, space), name), overload)


def record(node: fx.Node, args: object, kwargs: object, result: object, source: str) -> SingleOp:
    """Make a `SingleOp` of a node and the values it ran on.

    Args:
        node: a `call_function` of an op overload.
        args: its positional arguments, real.
        kwargs: its keyword arguments, real.
        result: what it returned.
        source: name of the program it is from.
    """
    tensors = _tensors((args, kwargs, result))
    used = tuple(sorted(u.args[1] for u in node.users if u.target is operator.getitem))
    text = f"{_text(args)} {_text(kwargs)} -> {used or ''}"
    return SingleOp(
        op=str(node.target),
        key=f"{node.target} {text}".rstrip(" ->{}"),
        dtypes=tuple(n for n, d in DTYPES.items() if any(t.dtype == d for t in tensors)),
        shape=_shape_class(tensors),
        source=source,
        call=pickle.dumps((args, kwargs, used)),
    )


def is_recordable(args: object, kwargs: object, result: object, max_elements: int) -> bool:
    """Say whether a call is small, returns tensors and uses only tensors a device can hold."""
    tensors = _tensors((args, kwargs, result))
    if not _tensors(result) or sum(t.numel() for t in tensors) > max_elements:
        return False
    return all(t.dtype in DTYPE_NAMES and t.layout is torch.strided for t in tensors)


@dataclass(frozen=True)
class Program:
    """A `SingleOp` as a device segment, with what eager PyTorch makes of it.

    Attributes:
        segment: the op's node (and `getitem` nodes), in a graph of their own.
        inputs: the real tensor behind each placeholder.
        expected: eager's results, in the order of `segment.outputs`.
    """

    segment: Segment
    inputs: dict[fx.Node, torch.Tensor]
    expected: tuple[torch.Tensor, ...]


def program(single: SingleOp) -> Program:
    """Build the graph of one op, with the placeholders and fake tensors that capture would leave."""
    args, kwargs, used = pickle.loads(single.call)
    leaves, spec = tree_flatten((args, kwargs))
    graph = fx.Graph()
    inputs = dict(_placeholders(graph, leaves))
    nodes = {id(t): n for n, t in inputs.items()}
    node_args, node_kwargs = tree_unflatten([nodes.get(id(v), v) for v in leaves], spec)
    node = graph.call_function(single.target, node_args, node_kwargs)
    result = single.target(*tree_map_only(torch.Tensor, torch.clone, args), **kwargs)
    node.meta["val"] = tree_map_only(torch.Tensor, _fake, result)
    if isinstance(result, torch.Tensor):
        outputs, expected = [node], (result,)
    else:
        outputs = [_getitem(graph, node, i) for i in used]
        expected = tuple(result[i] for i in used)
    graph.output(tuple(outputs))
    own = [node] if outputs == [node] else [node, *outputs]
    fx.GraphModule({}, graph)
    return Program(Segment(DEVICE, own, "region0"), inputs, expected)


def _placeholders(
    graph: fx.Graph, leaves: list[object]
) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    distinct = {id(v): v for v in leaves if isinstance(v, torch.Tensor)}
    for i, tensor in enumerate(distinct.values()):
        node = graph.placeholder(f"x{i}")
        node.meta["val"] = _fake(tensor)
        yield node, tensor


def _getitem(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    item = graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item


_FAKE = FakeTensorMode()


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    with _FAKE:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _tensors(values: object) -> list[torch.Tensor]:
    return [v for v in tree_flatten(values)[0] if isinstance(v, torch.Tensor)]


def _text(values: object) -> str:
    """Write arguments down: `(f32:2, alpha=1)`; a tensor by dtype, rank and what is special."""
    return str(tree_map_only(torch.Tensor, _TensorText, values))


class _TensorText:
    def __init__(self, tensor: torch.Tensor) -> None:
        shape = _shape_class([tensor])
        special = "" if shape == PLAIN else f":{shape}"
        self._text = f"{DTYPE_NAMES[tensor.dtype]}:{tensor.dim()}{special}"

    def __repr__(self) -> str:
        return self._text


def _shape_class(tensors: list[torch.Tensor]) -> str:
    if any(t.numel() == 0 for t in tensors):
        return EMPTY
    return SCALAR if any(t.dim() == 0 for t in tensors) else PLAIN

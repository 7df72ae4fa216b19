"""Random ops: drawn on the host with PyTorch's generator, from no more than the sizes of tensors.

What is drawn depends on the generator's state, on the dtype, and on how the result lies in memory,
but not on the values of a tensor that only gives its sizes. So the host need not wait for these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import guard_or_false

aten = torch.ops.aten
# Ops that overwrite their first argument, or only look at its sizes.
_FILLING = frozenset(
    {
        "aten.bernoulli.p",
        "aten.bernoulli.Tensor",
        "aten.cauchy.default",
        "aten.exponential.default",
        "aten.geometric.default",
        "aten.log_normal.default",
        "aten.normal_functional.default",
        "aten.rand_like.default",
        "aten.randint_like.default",
        "aten.randint_like.low_dtype",
        "aten.randn_like.default",
        "aten.random.default",
        "aten.random.from",
        "aten.random.to",
        "aten.uniform.default",
    }
)


def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """Decompose `aten.native_dropout`: the mask is the host's, the product the device's.

    Before: %y, %mask = native_dropout(%x, 0.1, True)
    After:  %mask = bernoulli(empty_like(%x), 0.9); %y = %x * %mask * (1 / 0.9)

    The mask is what eager draws: it fills a tensor that lies in memory as `x` does.
    """
    if train is False or p == 0:
        return torch.clone(x), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return x * 0.0, torch.zeros_like(x, dtype=torch.bool)
    mask = aten.bernoulli.p(torch.empty_like(x, dtype=torch.bool), 1 - p)
    return x * mask * (1 / (1 - p)), mask


DECOMPOSITIONS = {aten.native_dropout.default: native_dropout}


def read_sizes_only(graph: fx.Graph) -> None:
    """Let random ops that fill a tensor take an empty one: they need not wait for its values.

    Before: %1 = relu(%0); %2 = rand_like(%1)
    After:  %1 = relu(%0); %e = empty([4, 8]); %2 = rand_like(%e)
    """
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if str(node.target) not in _FILLING or not isinstance(source, fx.Node):
            continue
        while source.target is aten.empty_like.default and isinstance(source.args[0], fx.Node):
            source = source.args[0]
        value, wanted = source.meta.get("val"), node.args[0].meta["val"]
        if isinstance(value, torch.Tensor) and _is_contiguous(wanted):
            with graph.inserting_before(node):
                node.update_arg(0, _empty(graph, source, wanted))


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """Say whether it is known to be dense, in the order of its dimensions."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not guard_or_false(size == 1) and not guard_or_false(stride == expected):
            return False
        expected = expected * size
    return True


def _empty(graph: fx.Graph, source: fx.Node, wanted: torch.Tensor) -> fx.Node:
    """Add an empty tensor like `wanted`, whose sizes are those of `source`."""
    sizes: list[int | fx.Node] = []
    for dim, size in enumerate(wanted.shape):
        if isinstance(size, int):
            sizes.append(size)
            continue
        node = graph.call_function(aten.sym_size.int, (source, dim))
        node.meta["val"] = size
        sizes.append(node)
    empty = graph.call_function(
        aten.empty.memory_format, (sizes,), {"dtype": wanted.dtype, "device": wanted.device}
    )
    empty.meta = {"val": wanted, "stack_trace": source.meta.get("stack_trace")}
    return empty

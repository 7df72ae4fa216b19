"""Random ops: drawn on the host with PyTorch's generator, from no more than the sizes of tensors.

What is drawn depends on the generator's state, on the dtype, and on how the result lies in memory,
but not on the values of a tensor that only gives its sizes. So the host need not wait for these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import guard_or_false

from lowering.sizes import size_hint

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


# This one draws into a tensor of its own, in the order of the dimensions; eager draws in the order
# of the memory. The others draw into memory like that of their argument, normal numbers in another
# way where it is not in the order of the dimensions.
_MAKES_ITS_OWN = "aten.bernoulli."
_CPU = torch.device("cpu")


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

    The numbers go into memory in its order: what lies there in another order than that of its
    dimensions is drawn as it lies, and permuted.

    Before: %1 = relu(%0); %2 = rand_like(%1)
    After:  %1 = relu(%0); %e = empty([4, 8]); %2 = rand_like(%e)
    """
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if str(node.target) not in _FILLING or not isinstance(source, fx.Node):
            continue
        filled = source.meta["val"]
        order = _memory_order(filled)
        while source.target is aten.empty_like.default and isinstance(source.args[0], fx.Node):
            source = source.args[0]
        if order is None or node.kwargs.get("memory_format") not in (None, torch.preserve_format):
            continue
        is_natural = order == sorted(order)
        makes_its_own = str(node.target).startswith(_MAKES_ITS_OWN)
        make = _empty if is_natural or makes_its_own else _empty_permuted
        with graph.inserting_before(node):
            node.update_arg(0, make(graph, source, filled, order))
        if makes_its_own and not is_natural:
            _permute_result(graph, node, order)


def _memory_order(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions of a dense tensor from slowest to fastest, or None."""
    natural = list(range(tensor.dim()))
    for order in (natural, sorted(natural, key=lambda d: -size_hint(tensor.stride()[d]))):
        if _is_contiguous(tensor.permute(order)):
            return order
    return None


def _permute_result(graph: fx.Graph, node: fx.Node, order: list[int]) -> None:
    """Let who reads a node read its dimensions in their own order again."""
    back = [order.index(d) for d in range(len(order))]
    value = node.meta["val"]
    node.meta["val"] = value.new_empty([value.shape[d] for d in order])
    with graph.inserting_after(node):
        again = graph.call_function(aten.permute.default, (node, back))
    again.meta = {**node.meta, "val": node.meta["val"].permute(back)}
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """Say whether it is known to be dense, in the order of its dimensions."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not guard_or_false(size == 1) and not guard_or_false(stride == expected):
            return False
        expected = expected * size
    return True


def _empty(graph: fx.Graph, source: fx.Node, filled: torch.Tensor, order: list[int]) -> fx.Node:
    """Add an empty tensor like `filled`, its dimensions as they are in memory.

    Args:
        graph: where to; has an insertion point.
        source: a node of the same sizes.
        filled: what a random op fills.
        order: its dimensions from slowest to fastest.
    """
    sizes = _sizes(graph, source, [(dim, filled.shape[dim]) for dim in order])
    empty = graph.call_function(
        aten.empty.memory_format, (sizes,), {"dtype": filled.dtype, "device": _CPU}
    )
    empty.meta = {"val": filled.permute(order), "stack_trace": source.meta.get("stack_trace")}
    return empty


def _empty_permuted(
    graph: fx.Graph, source: fx.Node, filled: torch.Tensor, order: list[int]
) -> fx.Node:
    """Add an empty tensor that lies in memory as `filled` does; for the arguments see `_empty`."""
    sizes = _sizes(graph, source, [*enumerate(filled.shape)])
    empty = graph.call_function(
        aten.empty_permuted.default, (sizes, order), {"dtype": filled.dtype, "device": _CPU}
    )
    empty.meta = {"val": filled, "stack_trace": source.meta.get("stack_trace")}
    return empty


def _sizes(
    graph: fx.Graph, source: fx.Node, sizes: list[tuple[int, int | torch.SymInt]]
) -> list[int | fx.Node]:
    """Return (dimension, size) pairs as arguments: a symbolic size is asked of `source`."""
    found: list[int | fx.Node] = []
    for dim, size in sizes:
        if isinstance(size, int):
            found.append(size)
            continue
        node = graph.call_function(aten.sym_size.int, (source, dim))
        node.meta["val"] = size
        found.append(node)
    return found

"""A region's graph in the form that torch-mlir imports, and lowers rightly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lowering.nodes import is_number, origin_of
from lowering.sizes import is_static

aten = torch.ops.aten
Size: TypeAlias = Any  # int or SymInt
# Arithmetic on sizes that torch-mlir imports as an op, but not as the function that Dynamo traces.
_OPS_OF_SIZES = {
    torch.sym_max: torch.ops.prim.max.int,
    torch.sym_min: torch.ops.prim.min.int,
}
_DTYPES = {
    (bool, torch.SymBool): torch.bool,
    (int, torch.SymInt): torch.int64,
    (float, torch.SymFloat): torch.float64,
}


def make_importable(graph: fx.Graph) -> None:
    """Rewrite what a region does with dynamic sizes, in place.

    Views that merge dynamic dimensions collapse them first: torch-mlir lowers such a view as if one
    of them were 1. It is so in a region alone, where all values are dense: elsewhere
    `prims.collapse` is a copy where `aten.view` is none. Sizes taken for tensors become tensors.

    Before: %1 = aten.view(%0, [s0*s1, 8, 8])                      with %0 of [s0, s1, 64]
            %2 = aten.sub.Tensor(%s0, %1)
    After:  %1 = prims.collapse(%0, 0, 1); %2 = aten.view(%1, [s0*s1, 8, 8])
            %3 = aten.scalar_tensor(%s0, dtype=torch.int64); %4 = aten.sub.Tensor(%3, %2)

    Args:
        graph: every node carries its fake value.
    """
    for node in list(graph.nodes):
        node.target = _OPS_OF_SIZES.get(node.target, node.target)
        with graph.inserting_before(node):
            if isinstance(node.target, torch._ops.OpOverload):
                _make_tensors(graph, node)
            if node.target is aten.view.default:
                _collapse_merged(graph, node)


def _make_tensors(graph: fx.Graph, node: fx.Node) -> None:
    """Make tensors of the numbers that an op takes for tensors, if a size is one of them."""
    taken = zip(node.args, node.target._schema.arguments, strict=False)  # type: ignore[union-attr]
    numbers = {
        i: _value(argument)
        for i, (argument, declared) in enumerate(taken)
        if isinstance(declared.type, torch.TensorType) and is_number(_value(argument))
    }
    if all(isinstance(number, (bool, int, float)) for number in numbers.values()):
        return
    for i, number in numbers.items():
        dtype = next(dtype for kinds, dtype in _DTYPES.items() if isinstance(number, kinds))
        made = graph.call_function(aten.scalar_tensor.default, (node.args[i],), {"dtype": dtype})
        value = node.meta["val"].new_empty((), dtype=dtype)
        made.meta = {**origin_of(node.meta), "val": value}
        node.update_arg(i, made)


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _collapse_merged(graph: fx.Graph, view: fx.Node) -> None:
    source = view.all_input_nodes[0]
    old, new = source.meta["val"], view.meta["val"]
    groups = None if is_static(old, new) else shared_factors(old.shape, new.shape)
    for axis, (count, _) in enumerate(groups or ()):
        if count > 1:
            source = _collapsed(graph, view, source, axis, axis + count - 1)
    if groups is not None and all(len(sizes) == 1 for _, sizes in groups):
        view.replace_all_uses_with(source)
        graph.erase_node(view)
    else:
        view.update_arg(0, source)


def _collapsed(graph: fx.Graph, view: fx.Node, source: fx.Node, start: int, end: int) -> fx.Node:
    value = source.meta["val"]
    shape = [*value.shape]
    shape[start : end + 1] = [math.prod(shape[start : end + 1])]
    node = graph.call_function(torch.ops.prims.collapse.default, (source, start, end))
    node.meta = {**origin_of(view.meta), "val": value.new_empty(shape)}
    return node


def shared_factors(old: Sequence[Size], new: Sequence[Size]) -> list[tuple[int, list[Size]]] | None:
    """Match dimensions of two shapes of one size: groups whose products are equal.

    Returns:
        For each group how many old dimensions it has, and its new sizes; None if the sizes do not
        say which belong together.
    """
    if not old or not new:
        return None
    groups: list[tuple[int, list[Size]]] = []
    olds, news = list(old), list(new)
    while olds and news:
        count, sizes = 1, [news.pop(0)]
        before, after = olds.pop(0), sizes[0]
        while not statically_known_true(before == after):
            if olds and (not news or _divides(before, after)):
                before, count = before * olds.pop(0), count + 1
            elif news:
                sizes.append(news.pop(0))
                after = after * sizes[-1]
            else:
                return None
        groups.append((count, sizes))
    count, sizes = groups[-1]  # what is left has size 1 and belongs to the last group
    groups[-1] = (count + len(olds), sizes + news)
    return groups


def _divides(divisor: Size, number: Size) -> bool:
    if isinstance(divisor, int) and divisor == 0:
        return False
    return bool(statically_known_true(number % divisor == 0))

"""Tensors without elements: they are made, not computed, and add nothing to a concatenation."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lowering.nodes import write_call

aten = torch.ops.aten
_OURS = ("aten", "prims")
_PRODUCTS = (aten.mm.default, aten.bmm.default)
# op -> which argument says where it writes.
_WRITES = {
    aten.index_put.default: 1,
    aten.scatter.src: 2,
    aten.scatter.value: 2,
    aten.scatter_add.default: 2,
    aten.scatter_reduce.two: 2,
}


def make_empty_values(graph: fx.Graph) -> None:
    """Make each value that is known to have no elements, where compilers stumble over such.

    A product of matrices without a column is made, too: it is zeros. What is written to at no place
    is as it was.

    Before: %2 = aten.mul(%0, %1); %3 = aten.cat([%2, %a])       with %2 of [0, 4], %a of [3, 4]
            %4 = aten.scatter(%a, 0, %i, 1)                      with %i of [0, 4]
    After:  %2 = aten.empty([0, 4]); %3 = aten.cat([%a]); %4 = aten.clone(%a)
    """
    sizes: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            sizes.setdefault(str(value.node.expr), node)
        if node.op != "call_function":
            continue
        if node.target is aten.cat.default:
            _leave_out_empty(node)
        if _is_computed(node) and _is_empty(value):
            _make(node, sizes)
        elif node.target in _PRODUCTS and _is_empty(node.args[0].meta.get("val")):
            _make(node, sizes, 0)
        elif node.target in _WRITES and _writes_nothing(node):
            node.target, node.args, node.kwargs = aten.clone.default, (node.args[0],), {}


def _writes_nothing(node: fx.Node) -> bool:
    where = pytree.tree_leaves(node.args[_WRITES[node.target]])  # type: ignore[index]
    return any(index is not None and _is_empty(index.meta.get("val")) for index in where)


def _make(node: fx.Node, sizes: Mapping[str, fx.Node], fill: int | None = None) -> None:
    """Make a tensor in the place of a value, if what its sizes are is known before.

    Args:
        node: gives the value.
        sizes: the nodes that give sizes, by their expressions.
        fill: what each element is, if there are any.
    """
    value = node.meta["val"]
    known = [s if isinstance(s, int) else sizes.get(str(s.node.expr)) for s in value.shape]
    if None in known:
        return
    write = functools.partial(write_call, node.graph, node, value)
    with node.graph.inserting_before(node):
        made = write(aten.empty.memory_format, known, dtype=value.dtype)
        if fill is not None:
            made = write(aten.full_like.default, made, fill)
    node.replace_all_uses_with(made)


def _leave_out_empty(cat: fx.Node) -> None:
    tensors: Sequence[Any] = cat.args[0]  # type: ignore[assignment]
    full = [t for t in tensors if not _is_empty(t.meta.get("val"))]
    if full and all(t.meta["val"].dtype == cat.meta["val"].dtype for t in full):
        cat.update_arg(0, full)


def _is_computed(node: fx.Node) -> bool:
    """Say whether a node may be left out: what it computes is all that it does.

    The token of an op with effects is a tensor without elements, too, and orders the effects.
    """
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_computed(source)
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target is aten.empty.memory_format or target.namespace not in _OURS:
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _is_empty(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    if value.dtype.is_complex:  # torch-mlir makes none of these
        return False
    return any(isinstance(size, int) and size == 0 for size in value.shape)  # no guard on symbols

"""Tensors without elements: they are made, not computed, and add nothing to a concatenation."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowering.sizes import is_static

aten = torch.ops.aten
_OURS = ("aten", "prims")


def make_empty_values(graph: fx.Graph) -> None:
    """Make each value that is known to have no elements, where compilers stumble over such.

    Before: %2 = aten.mul(%0, %1); %3 = aten.cat([%2, %a])       with %2 of [0, 4], %a of [3, 4]
    After:  %2 = aten.empty([0, 4]); %3 = aten.cat([%a])
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.cat.default:
            _leave_out_empty(node)
        if _is_computed(node) and _is_empty(node.meta.get("val")):
            value = node.meta["val"]
            with graph.inserting_before(node):
                made = graph.call_function(
                    aten.empty.memory_format, (list(value.shape),), {"dtype": value.dtype}
                )
            made.meta = dict(node.meta)
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
    return is_static(value) and 0 in value.shape

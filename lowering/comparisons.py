"""Comparisons of what depends on no input with a number, in a form that is not folded.

torch-mlir folds `full([3], 1.0) > 0` to false, and literals likewise: it takes one number for
another. Comparisons with a tensor it leaves alone, or folds them rightly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lowering.nodes import origin_of

aten = torch.ops.aten
_OF_TENSORS = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor
    for name in ("eq", "ge", "gt", "le", "lt", "ne")
}


def compare_with_tensors(graph: fx.Graph) -> None:
    """Compare with a tensor what torch-mlir may know the value of.

    Before: %1 = aten.full_like(%0, 1.0); %2 = aten.gt.Scalar(%1, 0)
    After:  %1 = aten.full_like(%0, 1.0); %3 = aten.full_like(%1, 0); %2 = aten.gt.Tensor(%1, %3)
    """
    known: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op == "get_attr" or (node.op == "call_function" and _is_known(node, known)):
            known.add(node)
        if node.target in _OF_TENSORS and node.args[0] in known:
            _compare_with_tensor(node)


def _is_known(node: fx.Node, known: set[fx.Node]) -> bool:
    """Say whether what a node gives depends on sizes at most."""
    if node.target is aten.full_like.default:
        return True
    read = (n for n in node.all_input_nodes if not isinstance(n.meta.get("val"), torch.SymInt))
    return all(n in known for n in read)


def _compare_with_tensor(node: fx.Node) -> None:
    x: Any = node.args[0]
    number: Any = node.args[1]
    value = x.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(number, (bool, int, float)):
        return
    dtype = torch.result_type(value, number)
    if dtype.is_complex or not _holds(dtype, number):
        return

    def call(target: Any, *args: Any) -> fx.Node:
        made = node.graph.call_function(target, args)
        made.meta = origin_of(node.meta)
        return made

    with node.graph.inserting_before(node):
        if value.dtype is not dtype:
            x = call(torch.ops.prims.convert_element_type.default, x, dtype)
        number = call(aten.full_like.default, x, number)
        node.target, node.args = _OF_TENSORS[node.target], (x, number)


def _holds(dtype: torch.dtype, number: float) -> bool:
    if dtype.is_floating_point or dtype is torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return limits.min <= number <= limits.max

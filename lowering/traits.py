"""What a program contains that decides which compiler settings fit it: words for tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from lowering.decompositions.halves import HALVES
from lowering.nodes import converted

aten = torch.ops.aten
FEW_ROWS = 8
# product -> the position of its first factor.
_MATMULS: dict[object, int] = {
    aten._int_mm.default: 0,
    aten.mm.default: 0,
    aten.addmm.default: 1,
    aten.bmm.default: 0,
    aten.baddbmm.default: 1,
}
_GROUPS = 8  # argument of aten.convolution


def _is_convolution(node: fx.Node) -> bool:
    return "convolution" in str(node.target)


def _is_depthwise(node: fx.Node) -> bool:
    return node.target is aten.convolution.default and bool(node.args[_GROUPS] != 1)


def _is_matmul(node: fx.Node) -> bool:
    return node.target in _MATMULS


def _has_few_rows(node: fx.Node) -> bool:
    """Say whether a product reads its second factor for a few rows only, as in decoding."""
    if not _is_matmul(node):
        return False
    factor = node.args[_MATMULS[node.target]]
    rows = factor.meta["val"].shape[-2] if isinstance(factor, fx.Node) else None
    return isinstance(rows, int) and rows <= FEW_ROWS


def _is_float32(node: fx.Node) -> bool:
    """Say whether a product or convolution is one of float32.

    One of halves that were widened for it is one of halves
    (`lowering.stages.linalg.multiply_halves`).
    """
    first = _MATMULS.get(node.target)
    factors = node.args[:1] if first is None else node.args[first : first + 2]
    values = [factor.meta.get("val") for factor in factors if isinstance(factor, fx.Node)]
    is_float32 = any(isinstance(v, torch.Tensor) and v.dtype == torch.float32 for v in values)
    return is_float32 and not all(map(_is_widened, factors))


def _is_widened(value: object) -> bool:
    """Say whether a value was made of halves."""
    source = converted(value)
    return source is not None and source.meta["val"].dtype in HALVES


# word -> what a node is that makes a program have it.
_ANY: dict[str, Callable[[fx.Node], bool]] = {
    "convolution": _is_convolution,
    "depthwise": _is_depthwise,
    "matmul": _is_matmul,
}


def traits_of(graphs: Sequence[fx.GraphModule]) -> frozenset[str]:
    """Return what of the following graphs contain.

    `convolution`, `depthwise` (one in groups), `matmul`;
    `float32`: there are products or convolutions, all of that type; `few-rows`: there are products,
    and most have at most 8 rows.
    """
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    found = {word for word, is_such in _ANY.items() if any(map(is_such, nodes))}
    few, products = sum(map(_has_few_rows, nodes)), sum(map(_is_matmul, nodes))
    factors = [node for node in nodes if _is_matmul(node) or _is_convolution(node)]
    mostly = {
        "float32": factors and all(map(_is_float32, factors)),
        "few-rows": 2 * few > products,
    }
    return frozenset(found | {word for word, is_so in mostly.items() if is_so})

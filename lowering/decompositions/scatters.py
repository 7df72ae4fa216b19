"""Elements put where a mask or a diagonal says, or counted, which torch-mlir does not lower."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten


def masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> Any:
    """Decompose `aten.masked_scatter`: an element takes as many-th of the source as it is masked.

    Before: masked_scatter(%x, %m, %s)
    After:  %i = cumsum(view(%m, [-1]), 0) - 1; where(%m, view(%s, [-1])[where(%m, %i, 0)], %x)
    """
    if isinstance(source.numel(), int) and source.numel() == 0:
        return NotImplemented
    x, mask = torch.broadcast_tensors(x, mask)  # type: ignore[no-untyped-call]
    flat = mask.reshape(-1)
    place = torch.where(flat, _order(flat), 0)
    taken = torch.index_select(source.reshape(-1), 0, place)
    return torch.where(mask, taken.view(x.shape), x)


def masked_scatter_backward(
    gradient: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]
) -> torch.Tensor:
    """Decompose `aten.masked_scatter_backward`: the source gets the masked ones, in their order."""
    flat = mask.expand(gradient.shape).reshape(-1)
    count = math.prod(sizes)
    place = torch.where(flat, _order(flat), count)  # the last one is left out
    given = torch.where(flat, gradient.reshape(-1), 0)
    added = torch.scatter_add(gradient.new_zeros([count + 1]), 0, place, given)
    result: torch.Tensor = aten.slice.Tensor(added, 0, 0, count).view(sizes)
    return result


def histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Decompose `aten.histc` between two bounds; what is beyond them, or NaN, is not counted."""
    if min == max or x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    flat = x.reshape(-1)
    counts = (flat >= min) & (flat <= max)
    place = (torch.where(counts, flat, min) - min) * bins / (max - min)
    place = torch.clamp(place.to(torch.int64), 0, bins - 1)  # the last bin has its upper bound, too
    return torch.scatter_add(x.new_zeros([bins]), 0, place, counts.to(x.dtype))


def diagonal_scatter(
    x: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Any:
    """Decompose `aten.diagonal_scatter`: a choice by row and column between it and the rest."""
    moved = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = moved.shape[-2:]
    if source.shape[-1] == 0:
        return NotImplemented
    row = torch.arange(rows, device=x.device).unsqueeze(-1)
    column = torch.arange(columns, device=x.device)
    first = max(0, -offset)
    around = [first, rows - first - source.shape[-1]]
    by_row = aten.constant_pad_nd.default(source.to(x.dtype), around, 0)
    chosen = torch.where(column - row == offset, by_row.unsqueeze(-1), moved)
    return chosen.movedim((-2, -1), (dim1, dim2)).contiguous()


def scatter_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, reduce: str
) -> torch.Tensor:
    """Decompose `aten.scatter.reduce`, which has names of its own for two of `scatter_reduce`."""
    names = {"add": "sum", "multiply": "prod"}
    return torch.scatter_reduce(x, dim, index, source, names[reduce])


def scatter_number(x: torch.Tensor, dim: int, index: torch.Tensor, number: float) -> Any:
    """Decompose `aten.scatter.value` into a tensor of one element, which IREE leaves zero."""
    if x.dim() != 1 or x.shape[0] != 1:
        return NotImplemented
    return torch.where(_is_inside(index).any(), torch.full_like(x, number), x)


def scatter(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
    """Decompose `aten.scatter.src` of one element into one, as `scatter_number`."""
    if x.dim() != 1 or x.shape[0] != 1 or index.shape[0] != 1:
        return NotImplemented
    return torch.where(_is_inside(index), source[:1], x)


def _is_inside(index: torch.Tensor) -> torch.Tensor:
    """Look places up in a tensor of one element: that is checked, and true of all that is right."""
    return torch.index_select(index.new_ones([1]), 0, index) > 0


def _order(flat: torch.Tensor) -> torch.Tensor:
    """Count the true elements before each one."""
    return torch.cumsum(flat.to(torch.int64), 0) - 1


def scatter_mean(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    """Decompose the mean of `aten.scatter_reduce` on integers: it is rounded down."""
    if reduce != "mean" or x.is_floating_point() or x.is_complex():
        return NotImplemented
    total = torch.scatter_reduce(x, dim, index, source, "sum", include_self=include_self)
    start = torch.ones_like(x) if include_self else torch.zeros_like(x)
    count = torch.scatter_add(start, dim, index, torch.ones_like(source))
    return torch.div(total, torch.clamp(count, 1), rounding_mode="floor")


DECOMPOSITIONS = {
    aten.diagonal_scatter.default: diagonal_scatter,
    aten.histc.default: histc,
    aten.masked_scatter.default: masked_scatter,
    aten.masked_scatter_backward.default: masked_scatter_backward,
    aten.scatter.reduce: scatter_reduce,
    aten.scatter.src: scatter,
    aten.scatter.value: scatter_number,
    aten.scatter_reduce.two: scatter_mean,
}

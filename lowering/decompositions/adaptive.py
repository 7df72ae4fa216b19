"""Adaptive pooling, whose windows have different lengths, and what flows back through it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._decomp import decompositions

from lowering.decompositions.maxima import given_back
from lowering.decompositions.pooling import are_pooled
from lowering.sizes import are_known

aten = torch.ops.aten
_MAX_POOLS = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}
_PYTORCHS = decompositions.adaptive_avg_pool2d
_MOST_WINDOWS = 16  # along a dimension of a size that is not known


def adaptive_max_pool(x: torch.Tensor, output_size: Sequence[int]) -> Any:
    """Decompose `aten.adaptive_max_pool2d` and `3d`: torch-mlir's are for windows of one length.

    Of others its program finds out when it runs ("only support cases with fixed stride size").

    Before: adaptive_max_pool2d(%x, [3, 2])                            with %x of [N, C, 8, 4]
    After:  %w = x[..., [[0, 1, 2], [2, 3, 4, 5], [5, 6, 7]], [[0, 1], [2, 3]]], windows last;
            amax(%w, -1), and where in %x the first of the largest is
    """
    rank = len(output_size)
    sizes = x.shape[-rank:]
    if not are_known(sizes) and _are_few(output_size):
        return _largest_of_any(x, output_size)
    if not are_pooled(sizes) or 0 in output_size:
        return NotImplemented
    if all(size % count == 0 for size, count in zip(sizes, output_size, strict=True)):
        steps = [size // count for size, count in zip(sizes, output_size, strict=True)]
        return _MAX_POOLS[rank](x, steps, steps)
    place = torch.zeros((), dtype=torch.int64, device=x.device)
    windows = x
    for i, (size, count) in enumerate(zip(sizes, output_size, strict=True)):
        reads, _ = _windows(size, count, x.device)
        place = place[..., None, None] * size + reads
        windows = _read(windows, x.dim() - rank + 2 * i, reads)
    windows, place = _windows_last(windows, rank), _windows_last(place, rank)
    values = torch.amax(windows, -1, True)
    at = torch.arange(windows.shape[-1], device=x.device)
    rating = torch.where(windows == values, -at, -len(at))  # the first of the largest
    if x.dtype.is_floating_point:
        rating = torch.where(windows != windows, 1 + at, rating)  # or the last NaN
    is_it = rating == torch.amax(rating, -1, True)
    return values.squeeze(-1), torch.sum(torch.where(is_it, place, 0), -1)


def _largest_of_any(
    x: torch.Tensor, output_size: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the largest and their places along one dimension after the other, the last one first.

    The first of the largest is in the first row that has one, and the last NaN in the last row.
    """
    rank, ahead = len(output_size), 1
    values, places = x, torch.zeros((), dtype=torch.int64, device=x.device)
    lowest = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    for dim, count in zip(range(-1, -rank - 1, -1), reversed(output_size), strict=True):
        size, behind = x.shape[dim], [1] * (-1 - dim)
        at = torch.arange(size, device=x.device).view(-1, *behind)
        own = _all_of_windows(size, count, x.device)[0].view(count, -1, *behind)
        each = torch.where(own, values.unsqueeze(dim - 1), lowest)
        rating = torch.where(own & (each == torch.amax(each, dim, True)), -at, -size)
        if x.dtype.is_floating_point:
            rating = torch.where(each != each, 1 + at, rating)  # asks for NaN
        is_it = rating == torch.amax(rating, dim, True)
        place = places.unsqueeze(dim - 1) if places.dim() else places
        places = torch.sum(torch.where(is_it, at * ahead + place, 0), dim)
        values, ahead = torch.amax(each, dim), ahead * size
    return values, places


def adaptive_avg_pool(rank: int, x: torch.Tensor, output_size: Sequence[int]) -> Any:
    """Decompose `aten._adaptive_avg_pool2d` and `3d` of sizes that are not known.

    PyTorch's own decomposition makes each size that it meets a constant.

    Before: _adaptive_avg_pool2d(%x, [3, 2])                           with %x of [N, C, H, W]
    After:  %m, %n = which of H the 3 windows have, [3, H], and how many
            %1 = sum(where(%m, %x[:, :, None], 0), 3) / %n, [N, C, 3, W]; and so along W
    """
    if are_known(x.shape[-rank:]) or not _are_few(output_size):
        return _PYTORCHS(x, output_size) if rank == 2 else NotImplemented
    for dim, count in zip(range(x.dim() - rank, x.dim()), output_size, strict=True):
        behind = [1] * (x.dim() - 1 - dim)
        are_its_own, lengths = _all_of_windows(x.shape[dim], count, x.device)
        own = are_its_own.view(count, -1, *behind)
        x = torch.sum(torch.where(own, x.unsqueeze(dim), 0), dim + 1) / lengths.view(-1, *behind)
    return x


def adaptive_avg_pool_backward(rank: int, gradient: torch.Tensor, x: torch.Tensor) -> Any:
    """Decompose `aten._adaptive_avg_pool2d_backward` and `3d`.

    An element has its part in one window or in several that overlap. Which these are follows from
    the number of windows as which elements they have follows from that of elements. If that is not
    known, and windows are few, each is asked.
    """
    if are_pooled(x.shape[-rank:]):
        given = _given_by_some
    elif _are_few(gradient.shape[-rank:]):
        given = _given_by_each
    else:
        return NotImplemented
    for dim in range(x.dim() - rank, x.dim()):
        gradient = given(gradient, dim, x.shape[dim])
    return gradient


def _given_by_some(gradient: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Sum what each element gets of the windows along a dimension that it is in."""
    count, behind = gradient.shape[dim], [1] * (gradient.dim() - 1 - dim)
    _, are_its_own = _windows(size, count, gradient.device)
    part = gradient / torch.sum(are_its_own, -1).view(count, *behind)
    reads, are_its_own = _windows(count, size, gradient.device)
    own = are_its_own.view(*are_its_own.shape, *behind)
    return torch.sum(torch.where(own, _read(part, dim, reads), 0), dim + 1)


def _given_by_each(gradient: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Sum what each element gets of all windows along a dimension: nothing of most."""
    count, behind = gradient.shape[dim], [1] * (gradient.dim() - 1 - dim)
    are_its_own, lengths = _all_of_windows(size, count, gradient.device)
    part = (gradient / lengths.view(-1, *behind)).unsqueeze(dim + 1)
    return torch.sum(torch.where(are_its_own.view(count, -1, *behind), part, 0), dim)


def _are_few(counts: Sequence[int]) -> bool:
    """Say whether there are so few windows that each may be asked for all elements."""
    return are_known(counts) and all(0 < count <= _MOST_WINDOWS for count in counts)


def _all_of_windows(
    size: int, count: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which elements of all `count` windows have, `[count, size]`, and how many each."""
    start, end = _ends(size, count, device)
    at = torch.arange(size, device=device)
    return (at >= start) & (at < end), end - start


def _ends(size: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where windows begin, and where they have ended, each `[count, 1]`."""
    i = torch.arange(count, device=device).unsqueeze(-1)
    start = torch.div(i * size, count, rounding_mode="floor")
    return start, torch.div(i * size + size + count - 1, count, rounding_mode="floor")


def _windows(size: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which elements each of `count` windows reads, `[count, longest]`, and if they are its.

    The shorter ones read their last element again.
    """
    longest = max(-(-(i + 1) * size // count) - i * size // count for i in range(count))
    start, end = _ends(size, count, device)
    at = start + torch.arange(longest, device=device)
    return torch.minimum(at, end - 1), at < end


def _read(x: torch.Tensor, dim: int, reads: torch.Tensor) -> torch.Tensor:
    """Read windows along a dimension, which becomes two."""
    read = torch.index_select(x, dim, reads.flatten())
    return read.reshape(*x.shape[:dim], *reads.shape, *x.shape[dim + 1 :])


def _windows_last(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Put the elements of each window together: `[..., A, a, B, b]` becomes `[..., A, B, ab]`."""
    first = x.dim() - 2 * rank
    counts, lengths = range(first, x.dim(), 2), range(first + 1, x.dim(), 2)
    return x.permute(*range(first), *counts, *lengths).flatten(-rank)


DECOMPOSITIONS = {
    aten._adaptive_avg_pool2d.default: functools.partial(adaptive_avg_pool, 2),
    aten._adaptive_avg_pool3d.default: functools.partial(adaptive_avg_pool, 3),
    aten._adaptive_avg_pool2d_backward.default: functools.partial(adaptive_avg_pool_backward, 2),
    aten._adaptive_avg_pool3d_backward.default: functools.partial(adaptive_avg_pool_backward, 3),
    aten.adaptive_max_pool2d.default: adaptive_max_pool,
    aten.adaptive_max_pool2d_backward.default: functools.partial(given_back, 2),
    aten.adaptive_max_pool3d.default: adaptive_max_pool,
    aten.adaptive_max_pool3d_backward.default: functools.partial(given_back, 3),
}

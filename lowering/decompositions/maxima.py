"""Max pooling with places: which element of a window is the largest, and what flows back to it.

torch-mlir compares each element with the maximum: it finds no NaN (the place is -1, where the
gradient is then written to), and padding in a window of nothing but the lowest value. It refuses
windows that hang over the end (`ceil_mode`), and has none of three dimensions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lowering.decompositions.pooling import are_pooled, places_of
from lowering.decompositions.recursion import Ours
from lowering.sizes import are_empty, are_known, is_static, of_each

aten = torch.ops.aten
_OURS = Ours()
_MOST_PLACES = 32  # of a window that are compared one after the other; else, row by row


def max_pool2d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """Decompose `aten.max_pool2d_with_indices` into the op, for its values, and their places.

    Before: %v, %i = max_pool2d_with_indices(%x, 2)
    After:  %v = max_pool2d_with_indices(%x, 2)[0]
            %k = 0 where slice(%x, ...) is the largest of its window, 1 where the next is, ...
            %i = (2 * row + %k // 2) * W + 2 * column + %k % 2

    What hangs over the end is padded first.
    """
    stride = stride or kernel_size
    kernel, steps, pads, apart = (of_each(v, 2) for v in (kernel_size, stride, padding, dilation))
    if _OURS.is_done or are_empty(x):
        return NotImplemented
    if x.dim() == 3:
        found = max_pool2d(x.unsqueeze(0), kernel, steps, pads, apart, ceil_mode)
        return tuple(t.squeeze(0) for t in found)
    is_irregular = ceil_mode
    sizes, counts, covering = x.shape[-2:], list[Any](), list[Any]()
    for size, k, step, pad, d in zip(sizes, kernel, steps, pads, apart, strict=True):
        count = places_of(size, k, step, pad, d, ceil_mode)
        covered = (count - 1) * step + d * (k - 1) + 1
        counts.append(count)
        covering = [pad, covered - size - pad, *covering]
        if are_known([size]):
            is_irregular |= count == 1 and covered < size + 2 * pad
    amounts = covering if is_irregular else [pads[1], pads[1], pads[0], pads[0]]
    lowest = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    padded = aten.constant_pad_nd.default(x, amounts, lowest) if any(amounts) else x
    with _OURS:
        values = aten.max_pool2d_with_indices.default(padded, kernel, steps, [0, 0], apart)[0]
    firsts = [_first_inside(*v, x.device) for v in zip(counts, steps, pads, apart, strict=True)]
    (rows, row), (columns, column) = firsts
    places = _places_of_largest(padded, (row, column), lowest, counts, kernel, steps, apart)
    row = torch.div(places, kernel[1], rounding_mode="floor")
    column = places - row * kernel[1]
    row, column = rows.unsqueeze(-1) + row * apart[0], columns + column * apart[1]
    return values, row.to(torch.int64) * sizes[1] + column


def max_pool2d_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: torch.Tensor,
) -> Any:
    """Decompose `aten.max_pool2d_with_indices_backward` into a sum over the windows on an element.

    Every `stride` elements are in windows of the same numbers, or in some of these: each gives its
    gradient to the one whose place it has.

    Before: max_pool2d_with_indices_backward(%g, %x, 3, 2, 1, 1, False, %i)  with %x of [N, C, 8, 8]
    After:  %p = the place of each element, [4, 2, 4, 2]
            %1 = where(unsqueeze(%i, ...) == %p, unsqueeze(%g, ...), 0), for i of [N, C, 4, 1, 4, 1]
            view(%1 + the same of the windows to the right, below, and both, [N, C, 8, 8])
    """
    sizes, counts, steps = x.shape[-2:], gradient.shape[-2:], of_each(stride or kernel_size, 2)
    if not is_static(x, gradient) or are_empty(x, gradient):
        return given_back(2, gradient, x, indices)
    spans, amounts, blocks = list[range](), list[int](), list[int]()
    kernel, pads, apart = (of_each(v, 2) for v in (kernel_size, padding, dilation))
    each = zip(sizes, counts, kernel, steps, pads, apart, strict=True)
    for size, count, k, step, pad, d in each:
        blocks.append(-(-size // step))
        span = range(-(((k - 1) * d - pad) // step), (step - 1 + pad) // step + 1)
        before = max(-span.start, 0)
        amounts = [before, blocks[-1] + span.stop - 1 - count, *amounts]
        spans.append(range(span.start + before, span.stop + before))
    if math.prod(map(len, spans)) > _MOST_PLACES:
        return given_back(2, gradient, x, indices)
    (high, wide), (below, right) = blocks, steps
    places = torch.arange(high * below, device=x.device).unsqueeze(-1) * sizes[1]
    places = (places + torch.arange(wide * right, device=x.device)).to(torch.int32)
    places = places.view(high, below, wide, right)
    given = aten.constant_pad_nd.default(gradient, amounts, 0)
    chosen = aten.constant_pad_nd.default(indices.to(torch.int32), amounts, -1)
    parts = []
    for top, left in itertools.product(*spans):
        place, part = (
            _windows(v, (top, left), blocks, (1, 1)).unsqueeze(-1).unsqueeze(-3)
            for v in (chosen, given)
        )
        parts.append(torch.where(place == places, part, 0.0))
    whole = functools.reduce(torch.add, parts).reshape(*x.shape[:-2], high * below, wide * right)
    return whole[..., : sizes[0], : sizes[1]]


def max_pool3d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """Decompose `aten.max_pool3d_with_indices`: the largest of planes, then along the depth.

    Before: max_pool3d_with_indices(%x, 2)                           with %x of [N, C, D, H, W]
    After:  %1, %i = max_pool2d_with_indices(view(%x, [N, C*D, H, W]), 2)
            %2, %j = max_pool2d_with_indices(view(%1, [N, C, D, H/2 * W/2]), [2, 1])
            the index of %2 is gather(%i, 2, %j's depth) + H * W * %j's depth
    """
    if not are_pooled(x.shape[-3:]) or 0 in x.shape:
        return NotImplemented
    kernel, steps, pads, apart = (
        of_each(v, 3) for v in (kernel_size, stride or kernel_size, padding, dilation)
    )
    lead, (depth, height, width) = x.shape[:-3], x.shape[-3:]
    planes = x.reshape(-1, lead[-1] * depth, height, width)
    largest, in_plane = aten.max_pool2d_with_indices.default(
        planes, kernel[1:], steps[1:], pads[1:], apart[1:], ceil_mode
    )
    count = largest.shape[-2] * largest.shape[-1]
    columns = (-1, lead[-1], depth, count)
    values, indices = aten.max_pool2d_with_indices.default(
        largest.reshape(columns),
        [kernel[0], 1],
        [steps[0], 1],
        [pads[0], 0],
        [apart[0], 1],
        ceil_mode,
    )
    plane = torch.div(indices, count, rounding_mode="floor")
    indices = torch.gather(in_plane.reshape(columns), 2, plane) + plane * (height * width)
    shape = (*lead, values.shape[2], *largest.shape[-2:])
    return values.reshape(shape), indices.reshape(shape)


def max_pool3d_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: torch.Tensor,
) -> torch.Tensor:
    """Decompose `aten.max_pool3d_with_indices_backward`."""
    return given_back(3, gradient, x, indices)


def given_back(
    rank: int, gradient: torch.Tensor, x: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    """Add up the gradient of maxima where they were, by their indices in the last dimensions.

    So are `aten.adaptive_max_pool2d_backward` and `3d` decomposed, too.
    """
    zeros = gradient.new_zeros(x.shape).flatten(-rank)
    added = torch.scatter_add(zeros, -1, indices.flatten(-rank), gradient.flatten(-rank))
    return added.view(x.shape)


def _first_inside(
    count: int, step: int, pad: int, apart: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give where each window begins, and which of its places is the first that is not padding."""
    starts = torch.arange(count, device=device) * step - pad
    before = torch.clamp(-starts, min=0) + (apart - 1)
    first = torch.div(before, apart, rounding_mode="floor")
    return starts, first.to(torch.int32)


def _places_of_largest(
    x: torch.Tensor,
    starts: tuple[torch.Tensor, torch.Tensor],
    lowest: float,
    counts: Sequence[int],
    kernel: Sequence[int],
    steps: Sequence[int],
    apart: Sequence[int],
) -> torch.Tensor:
    """Number the first of the largest of each window, row by row, or the last NaN.

    Args:
        x: `[N, C, H, W]`, padded.
        starts: the row and the column that windows have that are of nothing but the lowest value.
        lowest: that value.
        counts, kernel, steps, apart: of windows.

    Returns:
        `[N, C, *counts]`, of int32.
    """
    (high, wide), (row, column) = kernel, starts
    start = (row * wide).unsqueeze(-1) + column
    if high * wide <= _MOST_PLACES:
        places = itertools.product(range(high), range(wide))
        pieces = (_windows(x, (i * apart[0], j * apart[1]), counts, steps) for i, j in places)
        return _largest(zip(pieces, itertools.count(), strict=False), lowest, start)[1]
    of_rows, along = [x.shape[-2], counts[1]], [1, steps[1]]
    pieces = (_windows(x, (0, j * apart[1]), of_rows, along) for j in range(wide))
    values, at = _largest(zip(pieces, itertools.count(), strict=False), lowest, column)
    down = counts, [steps[0], 1]
    rows = (
        (_windows(values, place, *down), _windows(at, place, *down) + i * wide)
        for i, place in ((i, (i * apart[0], 0)) for i in range(high))
    )
    return _largest(rows, lowest, start)[1]


def _largest(
    candidates: Iterable[tuple[torch.Tensor, Any]], lowest: float, start: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the first of the largest values, or the last NaN, and its place.

    Args:
        candidates: values, and their place, one after the other.
        lowest: what all of them may be.
        start: the place then.
    """
    largest: Any = lowest
    place = start
    for values, candidate in candidates:
        is_larger = values > largest
        if values.dtype.is_floating_point:
            is_larger = is_larger | (values != values)
        largest = torch.where(is_larger, values, largest)
        place = torch.where(is_larger, candidate, place)
    return largest, place


def _windows(
    x: torch.Tensor, first: Sequence[int], counts: Sequence[int], steps: Sequence[int]
) -> torch.Tensor:
    """Give one place of all windows: of the last two dimensions."""
    for i, (start, count, step) in enumerate(zip(first, counts, steps, strict=True)):
        dim = x.dim() - 2 + i
        x = aten.slice.Tensor(x, dim, start, start + (count - 1) * step + 1, step)
    return x


DECOMPOSITIONS = {
    aten.max_pool2d_with_indices.default: max_pool2d,
    aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
    aten.max_pool3d_with_indices.default: max_pool3d,
    aten.max_pool3d_with_indices_backward.default: max_pool3d_backward,
}

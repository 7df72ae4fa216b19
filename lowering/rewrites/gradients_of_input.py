"""What flows back to the input of a convolution, which is what a transposed convolution makes.

Others put zeros between the places of a gradient that a stride apart stood in the input, and
convolve those, too; here no such zero is read.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from lowering.decompositions.convolution import flipped
from lowering.rewrites.convolutions import convolved, is_left_to_blocks, is_worth_writing
from lowering.rewrites.recorder import part_of
from lowering.rewrites.windows import MOST_PLACES, Window, to_first, to_last

aten = torch.ops.aten
_MOST_PHASES = 16  # places between two windows, for the gradient of the input
# The places of a window that see an element of the input, and where in the gradient each does so.
_Seeing = list[tuple[int, int]]


def gradient_of_input(
    gradient: torch.Tensor,
    sizes: Sequence[int],
    weight: torch.Tensor,
    window: Window,
    groups: int,
) -> torch.Tensor:
    """Give the gradient of what was convolved.

    Args:
        gradient: `[N, F, ...]`.
        sizes: of the result, but for N and C.
        weight: `[F, C / groups, *kernel]`.
        window: of the convolution.
        groups: of it.

    Returns:
        `[N, C, *sizes]`.
    """
    if is_of_whole_strides(window, groups):
        return _in_one_product(gradient, sizes, weight, window)
    is_plain = math.prod(window.stride) == groups == 1
    is_product = (
        is_plain
        and is_worth_writing(gradient, sizes, math.prod(window.kernel))
        and not is_left_to_blocks(
            gradient, [weight.shape[1], gradient.shape[1]], window.kernel, sizes
        )
    )
    if math.prod(window.stride) > 1 or is_product:  # which need no flipped weight
        return _by_phases(gradient, sizes, weight, window, groups)
    rank = len(sizes)
    amounts: list[int] = []
    for size, _, pad, apart in zip(*window, strict=True):
        amounts = [apart * (size - 1) - pad] * 2 + amounts
    seen = padded(gradient, amounts)
    plain = Window(window.kernel, [1] * rank, [0] * rank, window.dilation)
    return convolved(seen, flipped(weight, groups), plain, groups)


def is_without_zeros(window: Window, groups: int) -> bool:
    """Say whether the gradient is written as what reads no zeros between two windows."""
    kernel, stride, *_ = window
    if math.prod(stride) == 1 or is_of_whole_strides(window, groups):
        return True
    places = math.prod(-(-size // step) for size, step in zip(kernel, stride, strict=True))
    return math.prod(stride) <= _MOST_PHASES and places <= MOST_PLACES


def is_of_whole_strides(window: Window, groups: int) -> bool:
    """Say whether as many places of a window see each element of the input, if not at its edge."""
    pairs = zip(window.kernel, window.stride, strict=True)
    is_whole = all(size % step == 0 for size, step in pairs)
    return is_whole and math.prod(window.dilation) == groups == 1 < math.prod(window.stride)


def padded(x: torch.Tensor, amounts: Sequence[int]) -> torch.Tensor:
    """Put zeros around a tensor, if any are to be."""
    wide: torch.Tensor = aten.constant_pad_nd.default(x, amounts, 0) if any(amounts) else x
    return wide


def row_of(place: Sequence[int], sizes: Sequence[int]) -> int:
    """Number a place of an image, row by row."""
    row = 0
    for i, size in zip(place, sizes, strict=True):
        row = row * size + i
    return row


def _in_one_product(
    gradient: torch.Tensor, sizes: Sequence[int], weight: torch.Tensor, window: Window
) -> torch.Tensor:
    """Compute all that is between two strides at a time, of the places that all of it is seen by.

    Before: %gx = convolution_backward(%g, %x, %w, stride [2])         with %w of [F, C, 4]
    After:  %s = cat([%p[:, 1:], %p[:, :-1]], -1)                      with %p the padded %g, C last
            %1 = view(mm(%s, view(permute(view(%w, [F, C, 2, 2])), [2 * F, 2 * C])), [N, -1, C])
            %gx = the part of %1 that is not padding, C first
    """
    stride, rank, (features, channels, *_) = window.stride, len(sizes), weight.shape
    times = [size // step for size, step in zip(window.kernel, stride, strict=True)]
    around = [t - 1 for t in reversed(times) for _ in range(2)]
    wide = padded(gradient.permute(to_last(rank + 2)), [0, 0, *around])
    counts = [size + t - 1 for size, t in zip(gradient.shape[2:], times, strict=True)]
    pieces = []
    for place in itertools.product(*map(range, times)):
        piece = wide
        for i, (j, t) in enumerate(zip(place, times, strict=True)):
            piece = part_of(piece, 1 + i, t - 1 - j, counts[i])
        pieces.append(piece)
    seen = torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0].contiguous()
    rows = aten.view.default(seen, [seen.shape[0] * math.prod(counts), seen.shape[-1]])
    pairs = [size for pair in zip(times, stride, strict=True) for size in pair]
    apart = weight.reshape([features, channels, *pairs])
    ahead, within = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
    by = apart.permute(*ahead, 0, *within, 1)
    by = by.reshape([math.prod(times) * features, math.prod(stride) * channels])
    phases = aten.view.default(torch.mm(rows, by), [seen.shape[0], *counts, *stride, channels])
    whole = _side_by_side(phases, rank)
    ends = [(0, max(s - 1 - pad, 0)) for s, pad in zip(stride, window.padding, strict=True)]
    whole = padded(whole, [0, 0, *(n for end in reversed(ends) for n in end)])
    for i, (size, pad) in enumerate(zip(sizes, window.padding, strict=True)):
        whole = part_of(whole, 1 + i, pad, size)
    return whole.permute(to_first(rank + 2))


def _by_phases(
    gradient: torch.Tensor,
    sizes: Sequence[int],
    weight: torch.Tensor,
    window: Window,
    groups: int,
) -> torch.Tensor:
    """Compute every `stride`-th row and column by itself: other places of the window see each.

    Before: %gx = convolution_backward(%g, %x, %w, stride [2, 2])       with %w of [F, C, 3, 3]
    After:  four products, of what 4, 2, 2 and 1 places see, and each one's rows and columns between
            the others'
    """
    stride, rank, channels = window.stride, len(sizes), weight.shape[1] * groups
    counts = [-(-size // step) for size, step in zip(sizes, stride, strict=True)]
    amounts, seeing = [0, 0], list[list[_Seeing]]()
    for kernel, step, pad, apart in zip(*window, strict=True):
        of_dim: list[_Seeing] = [[] for _ in range(step)]
        for place in range(kernel):
            ahead, start = divmod(apart * place - pad, step)
            of_dim[start].append((place, -ahead))
        first = min(offset for found in of_dim for _, offset in found)
        last = max(offset for found in of_dim for _, offset in found)
        left = max(-first, 0)
        # The most that `size + last` may be over the gradient's size.
        right = max(last - 1 + (2 * step - 1 - 2 * pad + apart * (kernel - 1)) // step, 0)
        amounts = [0, 0, left, right, *amounts[2:]]
        seeing.append([[(place, offset + left) for place, offset in found] for found in of_dim])
    wide = padded(gradient.permute(to_last(rank + 2)), amounts)
    by_place = weight.permute(*range(2, 2 + rank), 0, 1).contiguous().flatten(0, rank - 1)
    phases = []
    for found in itertools.product(*seeing):
        pieces, places = [], []
        for chosen in itertools.product(*found):
            piece = wide
            for i, (_, offset) in enumerate(chosen):
                piece = part_of(piece, 1 + i, offset, counts[i])
            pieces.append(piece)
            places.append(row_of([place for place, _ in chosen], window.kernel))
        if pieces:
            phases.append(_products_of_places(pieces, _chosen(by_place, places), groups))
        else:  # between windows
            all_sizes = [gradient.shape[0], *counts, channels]
            phases.append(aten.full.default(all_sizes, 0.0, dtype=gradient.dtype))
    all_phases = [gradient.shape[0], *counts, *stride, channels]
    whole = _side_by_side(aten.view.default(torch.cat([*phases], -1), all_phases), rank)
    for i, size in enumerate(sizes):
        whole = part_of(whole, 1 + i, 0, size)
    return whole.permute(to_first(rank + 2))


def _chosen(rows: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Give some rows, in order; all of them as they are."""
    if [*places] == [*range(rows.shape[0])]:
        return rows
    return torch.cat([rows.narrow(0, place, 1) for place in places])


def _products_of_places(
    pieces: Sequence[torch.Tensor], weights: torch.Tensor, groups: int
) -> torch.Tensor:
    """Sum what each of K places saw, [N, ..., F], times its weight, of [K, F, C / groups]."""
    *places, features = pieces[0].shape
    channels = weights.shape[2] * groups
    if groups == features == channels:
        pairs = zip(pieces, weights.squeeze(2).unbind(0), strict=True)
        return functools.reduce(torch.add, [piece * w for piece, w in pairs])
    rows, width = math.prod(places), features // groups
    if groups == 1:
        flat = aten.view.default(torch.cat([*pieces], -1), [rows, len(pieces) * width])
        y = torch.mm(flat, weights.flatten(0, 1))
    else:
        apart = [*places, groups, width]
        seen = torch.cat([aten.view.default(p.contiguous(), apart) for p in pieces], -1)
        flat = aten.view.default(seen, [rows, groups, len(pieces) * width])
        of_group = torch.cat([w.reshape(groups, width, -1) for w in weights.unbind(0)], 1)
        y = torch.bmm(flat.permute(1, 0, 2), of_group).permute(1, 0, 2).contiguous()
    whole: torch.Tensor = aten.view.default(y, [*places, channels])
    return whole


def _side_by_side(phases: torch.Tensor, rank: int) -> torch.Tensor:
    """Put what is within a stride where it stood: of [N, *sizes, *stride, C], [N, ..., C]."""
    (count, *sizes), channels = phases.shape[: 1 + rank], phases.shape[-1]
    between = [dim for i in range(rank) for dim in (1 + i, 1 + rank + i)]
    apart = phases.permute(0, *between, 1 + 2 * rank).contiguous()
    steps = phases.shape[1 + rank : 1 + 2 * rank]
    wide = [size * step for size, step in zip(sizes, steps, strict=True)]
    whole: torch.Tensor = aten.view.default(apart, [count, *wide, channels])
    return whole

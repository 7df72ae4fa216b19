"""Gradients of convolutions of images of any size, from what holds for each size.

torch-mlir lowers those of unknown sizes without a stride, and not in groups; it pads the gradient
by less than nothing where the image was padded by more than the window reaches, which is wrong.
Sizes are not compared here: where a slice ends is known from the convolution (`part_of`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from lowering.decompositions.convolution import flipped
from lowering.decompositions.halves import widened
from lowering.rewrites.convolutions import convolution, is_left_to_blocks, is_worth_writing
from lowering.rewrites.recorder import part_of
from lowering.rewrites.windows import Window, to_first, to_last
from lowering.sizes import are_empty, are_known

aten = torch.ops.aten
MOST_PLACES_OF_GRADIENT = 64  # of a window, for the gradient of the weight
# The places of a window that see an element of the input, and where in the gradient each does so.
_Seeing = list[tuple[int, int]]


def of_any_size(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """Rewrite `aten.convolution_backward` of tensors of unknown sizes; those of windows are known.

    Before: %gx, %gw, %gb = convolution_backward(%g, %x, %w, ...)          with %w of [F, C, 3, 3]
    After:  %gw = view(cat([mm(permute(%g), %0), mm(permute(%g), %1), ...]), [F, C, 3, 3]), with %0,
            %1, ... what each place of the window saw
            %gx = convolution(constant_pad_nd(%g, ...), flip(permute(%w)), ...); with a stride,
            `_by_phases`
            %gb = sum(%g, [0, 2, 3])
    """
    if not x.dtype.is_floating_point or are_empty(gradient, x, weight):
        return NotImplemented
    kinds = x.dtype, weight.dtype
    gradient, x, weight = widened(gradient), widened(x), widened(weight)
    window = Window.of(x.dim() - 2, weight.shape[2:], stride, padding, dilation)
    if not all(map(are_known, window)):
        return NotImplemented
    is_little = math.prod(window.kernel) <= MOST_PLACES_OF_GRADIENT
    of_x = of_weight = of_bias = None
    if output_mask[1] and _are_tiles(window, groups) and not transposed:
        of_weight = _gradient_of_weight_of_tiles(gradient, x, weight).to(kinds[1])
    elif output_mask[1] and not is_little:
        places = (*window[1:], transposed, output_padding, groups)
        wanted = [False, True, False]
        found = aten.convolution_backward.default(gradient, x, weight, bias_sizes, *places, wanted)
        of_weight = found[1].to(kinds[1])
    elif output_mask[1]:
        pair = (x, gradient) if transposed else (gradient, x)
        of_weight = _gradient_of_weight(*pair, weight, window, groups).to(kinds[1])
    if output_mask[0] and transposed:
        of_x = _convolved(gradient, weight, window, groups).to(kinds[0])
        for dim in range(2, x.dim()):
            of_x = part_of(of_x, dim, 0, x.shape[dim])
    elif output_mask[0]:
        of_x = gradient_of_input(gradient, x, weight, window, groups).to(kinds[0])
    if output_mask[2]:
        of_bias = gradient.sum([0, *range(2, x.dim())]).to(kinds[1])
    return of_x, of_weight, of_bias


def gradient_of_input(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, window: Window, groups: int
) -> torch.Tensor:
    """Give the gradient of what was convolved.

    Args:
        gradient: `[N, F, ...]`.
        x: `[N, C, ...]`; only its sizes are read.
        weight: `[F, C / groups, *kernel]`.
        window: of the convolution.
        groups: of it.

    Returns:
        `[N, C, ...]`.
    """
    if _are_tiles(window, groups):
        return _gradient_of_tiles(gradient, x, weight)
    is_plain = math.prod(window.stride) == groups == 1
    sizes = x.shape[2:]
    is_product = (
        is_plain
        and is_worth_writing(gradient, sizes, math.prod(window.kernel))
        and not is_left_to_blocks(gradient, [x.shape[1], gradient.shape[1]], window.kernel, sizes)
    )
    if math.prod(window.stride) > 1 or is_product:  # which need no flipped weight
        return _by_phases(gradient, x, weight, window, groups)
    rank = x.dim() - 2
    amounts: list[int] = []
    for size, _, pad, apart in zip(*window, strict=True):
        amounts = [apart * (size - 1) - pad] * 2 + amounts
    seen = _padded(gradient, amounts)
    plain = Window(window.kernel, [1] * rank, [0] * rank, window.dilation)
    return _convolved(seen, flipped(weight, groups), plain, groups)


def _convolved(x: torch.Tensor, weight: torch.Tensor, window: Window, groups: int) -> torch.Tensor:
    """Convolve in the best form that there is."""
    args = (x, weight, None, *window[1:], False, [0] * (x.dim() - 2), groups)
    y = convolution(*args)
    found: torch.Tensor = aten.convolution.default(*args) if y is NotImplemented else y
    return found


def _are_tiles(window: Window, groups: int) -> bool:
    """Say whether windows stand side by side, without a gap: those of patch embeddings."""
    is_whole = math.prod(window.dilation) == groups == 1 and not any(window.padding)
    return is_whole and list(window.stride) == list(window.kernel) and math.prod(window.stride) > 1


def _gradient_of_tiles(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Multiply the gradient by the weight, one product for all places of a tile."""
    (count, _, *places), (_, channels, *kernel) = gradient.shape, weight.shape
    rank, pairs = len(kernel), list(zip(places, kernel, strict=True))
    tiles = torch.mm(_rows(gradient), weight.flatten(1))
    apart = aten.view.default(tiles, [count, *places, channels, *kernel])
    dims = [dim for i in range(rank) for dim in (1 + i, 2 + rank + i)]
    near = apart.permute(0, 1 + rank, *dims).contiguous()
    whole = aten.view.default(near, [count, channels, *(of * size for of, size in pairs)])
    result = _padded(whole, [n for size in reversed(kernel) for n in (0, size - 1)])
    for dim in range(2, x.dim()):
        result = part_of(result, dim, 0, x.shape[dim])
    return result


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Write [N, C, ...] as rows of channels."""
    last = x.permute(to_last(x.dim())).contiguous()
    rows: torch.Tensor = aten.view.default(last, [math.prod(last.shape[:-1]), x.shape[1]])
    return rows


def _gradient_of_weight_of_tiles(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Multiply the gradient by the tiles that the windows saw, one product for all places.

    Args:
        gradient: `[N, F, ...]`.
        x: what was convolved, `[N, C, ...]`.
        weight: only its sizes are read.

    Returns:
        `[F, C, *kernel]`.
    """
    (count, _, *places), (_, channels, *kernel) = gradient.shape, weight.shape
    rank, rows = len(kernel), _rows(gradient)
    for i, (of, size) in enumerate(zip(places, kernel, strict=True)):
        x = part_of(x, 2 + i, 0, of * size)
    pairs = [size for pair in zip(places, kernel, strict=True) for size in pair]
    apart = aten.view.default(x.contiguous(), [count, channels, *pairs])
    tiles = apart.permute(0, *range(2, 2 + 2 * rank, 2), 1, *range(3, 3 + 2 * rank, 2))
    tiles = aten.view.default(tiles.contiguous(), [rows.shape[0], channels * math.prod(kernel)])
    whole = torch.mm(rows.t(), tiles)
    result: torch.Tensor = aten.view.default(whole, [*weight.shape])
    return result


def _gradient_of_weight(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, window: Window, groups: int
) -> torch.Tensor:
    """Multiply the gradient by what each place of the window saw.

    The gradient gets rows and columns of zeros at its end, until it has as many as the padded
    image. What a place saw is then one piece of all rows of the image, from some row on: nothing is
    copied, and one program is for all places, since none of them starts at a row that is known.
    Rows beyond the image, and those of other places, are multiplied by zeros.

    Args:
        gradient: `[N, F, ...]`.
        x: what was convolved, `[N, C, ...]`.
        weight: only its sizes are read.
        window: of the convolution.
        groups: of it.

    Returns:
        `[F, C / groups, *kernel]`.
    """
    _, stride, padding, _ = window
    reach = [apart * (size - 1) for size, apart in zip(window.kernel, window.dilation, strict=True)]
    more = [far // step for far, step in zip(reach, stride, strict=True)]
    places = [size + m for size, m in zip(gradient.shape[2:], more, strict=True)]
    amounts: list[int] = []
    for far, step, pad, m in zip(reach, stride, padding, more, strict=True):
        # At most so many are missing at the end: the gradient has (size + 2 * pad - far - 1) //
        # step + 1 of them.
        amounts = [pad, max(pad - far - 1 + step + step * m, 0), *amounts]
    last = to_last(x.dim())
    before = int(math.prod(window.kernel) > 1)  # images of zeros: behind one, no row is known
    padded = _padded(x.permute(last), [0, 0, *amounts, before, 0])
    for i, (count, step) in enumerate(zip(places, stride, strict=True)):
        padded = part_of(padded, 1 + i, 0, count * step)
    if math.prod(stride) > 1:
        padded = _apart(padded, places, stride)
    of_image, channels = math.prod(places), x.shape[1]
    of_phase = (x.shape[0] + before) * of_image
    rows = aten.view.default(padded.contiguous(), [math.prod(stride) * of_phase, channels])
    ends = [amount for m in reversed(more) for amount in (0, m)]
    by = _padded(gradient.permute(last), [0, 0, *ends])
    by = aten.view.default(by.contiguous(), [x.shape[0] * of_image, gradient.shape[1]])
    count = x.shape[0] * of_image - _row_of(more, places)  # all others are zeros
    by = part_of(by, 0, 0, count)
    parts = []
    for place in itertools.product(*map(range, window.kernel)):
        offsets = [i * apart for i, apart in zip(place, window.dilation, strict=True)]
        starts = [n % step for n, step in zip(offsets, stride, strict=True)]
        ahead = [n // step for n, step in zip(offsets, stride, strict=True)]
        first = of_phase * _row_of(starts, stride) + before * of_image + _row_of(ahead, places)
        parts.append(_products_of_channels(by, part_of(rows, 0, first, count), groups))
    whole = torch.cat([part.unsqueeze(0) for part in parts]).permute(1, 2, 0).contiguous()
    result: torch.Tensor = aten.view.default(whole, [*weight.shape])
    return result


def _padded(x: torch.Tensor, amounts: Sequence[int]) -> torch.Tensor:
    padded: torch.Tensor = aten.constant_pad_nd.default(x, amounts, 0) if any(amounts) else x
    return padded


def _row_of(place: Sequence[int], sizes: Sequence[int]) -> int:
    """Number a place of an image, row by row."""
    row = 0
    for i, size in zip(place, sizes, strict=True):
        row = row * size + i
    return row


def _apart(x: torch.Tensor, places: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Put every `stride`-th row and column of [N, ..., C] together: [*stride, N, *places, C]."""
    rank, (count, *_, channels) = len(stride), x.shape
    pairs = [size for pair in zip(places, stride, strict=True) for size in pair]
    apart: torch.Tensor = aten.view.default(x.contiguous(), [count, *pairs, channels])
    steps, between = range(2, 2 + 2 * rank, 2), range(1, 1 + 2 * rank, 2)
    return apart.permute(*steps, 0, *between, 1 + 2 * rank).contiguous()


def _products_of_channels(x: torch.Tensor, y: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum the products of channels over all rows: of [M, F] and [M, C], [F, C / groups]."""
    (rows, features), (_, channels) = x.shape, y.shape
    if groups == features == channels:
        return (x * y).sum([0]).unsqueeze(-1)
    if groups == 1:
        return torch.mm(x.t(), y)
    of_x = aten.view.default(x, [rows, groups, features // groups])
    of_y = aten.view.default(y, [rows, groups, channels // groups])
    whole = torch.bmm(of_x.permute(1, 2, 0), of_y.permute(1, 0, 2))
    found: torch.Tensor = aten.view.default(whole, [features, channels // groups])
    return found


def _by_phases(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, window: Window, groups: int
) -> torch.Tensor:
    """Compute every `stride`-th row and column by itself: other places of the window see each.

    Before: %gx = convolution_backward(%g, %x, %w, stride [2, 2])       with %w of [F, C, 3, 3]
    After:  four products, of what 4, 2, 2 and 1 places see, and each one's rows and columns between
            the others'
    """
    stride = window.stride
    sizes = [-(-size // step) for size, step in zip(x.shape[2:], stride, strict=True)]
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
    padded = _padded(gradient.permute(to_last(x.dim())), amounts)
    rank = len(stride)
    by_place = weight.permute(*range(2, 2 + rank), 0, 1).contiguous().flatten(0, rank - 1)
    phases = []
    for found in itertools.product(*seeing):
        pieces, places = [], []
        for chosen in itertools.product(*found):
            piece = padded
            for i, (_, offset) in enumerate(chosen):
                piece = part_of(piece, 1 + i, offset, sizes[i])
            pieces.append(piece)
            places.append(_row_of([place for place, _ in chosen], window.kernel))
        if pieces:
            phases.append(_products_of_places(pieces, _chosen(by_place, places), groups))
        else:  # between windows
            all_sizes = [x.shape[0], *sizes, x.shape[1]]
            phases.append(aten.full.default(all_sizes, 0.0, dtype=gradient.dtype))
    return _interleaved(phases, stride, x)


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


def _interleaved(
    phases: Sequence[torch.Tensor], stride: Sequence[int], x: torch.Tensor
) -> torch.Tensor:
    """Put each phase's rows and columns between the others', and channels first."""
    count, *sizes, channels = phases[0].shape
    rank = len(sizes)
    whole = aten.view.default(torch.cat([*phases], -1), [count, *sizes, *stride, channels])
    between = [dim for i in range(rank) for dim in (1 + i, 1 + rank + i)]
    apart = whole.permute(0, *between, 1 + 2 * rank).contiguous()
    wide = [size * step for size, step in zip(sizes, stride, strict=True)]
    placed: torch.Tensor = aten.view.default(apart, [count, *wide, channels])
    for i in range(rank):
        placed = part_of(placed, 1 + i, 0, x.shape[2 + i])
    return placed.permute(to_first(x.dim()))

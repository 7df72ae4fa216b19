"""Gradients of convolutions of images of any size, from what holds for each size.

torch-mlir lowers those of unknown sizes without a stride, and not in groups; it pads the gradient
by less than nothing where the image was padded by more than the window reaches, which is wrong.
Sizes are not compared here: where a slice ends is known from the convolution (`part_of`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from lowering.decompositions.halves import widened
from lowering.rewrites.convolutions import convolved
from lowering.rewrites.gradients_of_input import gradient_of_input, padded, row_of
from lowering.rewrites.recorder import part_of
from lowering.rewrites.windows import Window, to_last
from lowering.sizes import are_empty, are_known

aten = torch.ops.aten
MOST_PLACES_OF_GRADIENT = 64  # of a window, for the gradient of the weight


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
    are_tiles = window.are_side_by_side and math.prod(window.kernel) > 1
    if output_mask[1] and are_tiles and groups == 1 and not transposed:
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
        of_x = convolved(gradient, weight, window, groups).to(kinds[0])
        for dim in range(2, x.dim()):
            of_x = part_of(of_x, dim, 0, x.shape[dim])
    elif output_mask[0]:
        of_x = gradient_of_input(gradient, x.shape[2:], weight, window, groups).to(kinds[0])
    if output_mask[2]:
        of_bias = gradient.sum([0, *range(2, x.dim())]).to(kinds[1])
    return of_x, of_weight, of_bias


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
    wide = padded(x.permute(last), [0, 0, *amounts, before, 0])
    for i, (count, step) in enumerate(zip(places, stride, strict=True)):
        wide = part_of(wide, 1 + i, 0, count * step)
    if math.prod(stride) > 1:
        wide = _apart(wide, places, stride)
    of_image, channels = math.prod(places), x.shape[1]
    of_phase = (x.shape[0] + before) * of_image
    rows = aten.view.default(wide.contiguous(), [math.prod(stride) * of_phase, channels])
    ends = [amount for m in reversed(more) for amount in (0, m)]
    by = padded(gradient.permute(last), [0, 0, *ends])
    by = aten.view.default(by.contiguous(), [x.shape[0] * of_image, gradient.shape[1]])
    count = x.shape[0] * of_image - row_of(more, places)  # all others are zeros
    by = part_of(by, 0, 0, count)
    parts = []
    for place in itertools.product(*map(range, window.kernel)):
        offsets = [i * apart for i, apart in zip(place, window.dilation, strict=True)]
        starts = [n % step for n, step in zip(offsets, stride, strict=True)]
        ahead = [n // step for n, step in zip(offsets, stride, strict=True)]
        first = of_phase * row_of(starts, stride) + before * of_image + row_of(ahead, places)
        parts.append(_products_of_channels(by, part_of(rows, 0, first, count), groups))
    whole = torch.cat([part.unsqueeze(0) for part in parts]).permute(1, 2, 0).contiguous()
    result: torch.Tensor = aten.view.default(whole, [*weight.shape])
    return result


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


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Write [N, C, ...] as rows of channels."""
    last = x.permute(to_last(x.dim())).contiguous()
    rows: torch.Tensor = aten.view.default(last, [math.prod(last.shape[:-1]), x.shape[1]])
    return rows

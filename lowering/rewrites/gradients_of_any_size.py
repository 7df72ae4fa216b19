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
from lowering.rewrites.convolutions import convolution
from lowering.rewrites.recorder import part_of
from lowering.rewrites.windows import Window, to_first, to_last
from lowering.sizes import are_empty, are_known

aten = torch.ops.aten
_UNCHANGED: Any = NotImplemented
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
        return _UNCHANGED
    kinds = x.dtype, weight.dtype
    gradient, x, weight = widened(gradient), widened(x), widened(weight)
    window = Window.of(x.dim() - 2, weight.shape[2:], stride, padding, dilation)
    if not all(map(are_known, window)):
        return _UNCHANGED
    is_little = math.prod(window.kernel) <= MOST_PLACES_OF_GRADIENT
    of_x = of_weight = of_bias = None
    if output_mask[1] and not is_little:
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
    if math.prod(window.stride) > 1:
        return _by_phases(gradient, x, weight, window, groups)
    rank = x.dim() - 2
    amounts: list[int] = []
    for size, _, pad, apart in zip(*window, strict=True):
        amounts = [apart * (size - 1) - pad] * 2 + amounts
    seen = aten.constant_pad_nd.default(gradient, amounts, 0)
    plain = Window(window.kernel, [1] * rank, [0] * rank, window.dilation)
    return _convolved(seen, flipped(weight, groups), plain, groups)


def _convolved(x: torch.Tensor, weight: torch.Tensor, window: Window, groups: int) -> torch.Tensor:
    """Convolve in the best form that there is."""
    args = (x, weight, None, *window[1:], False, [0] * (x.dim() - 2), groups)
    y = convolution(*args)
    found: torch.Tensor = aten.convolution.default(*args) if y is _UNCHANGED else y
    return found


def _gradient_of_weight(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, window: Window, groups: int
) -> torch.Tensor:
    """Multiply the gradient by what each place of the window saw.

    Args:
        gradient: `[N, F, ...]`.
        x: what was convolved, `[N, C, ...]`.
        weight: only its sizes are read.
        window: of the convolution.
        groups: of it.

    Returns:
        `[F, C / groups, *kernel]`.
    """
    _, stride, padding, dilation = window
    last = to_last(x.dim())
    amounts = [0, 0, *(amount for pad in reversed(padding) for amount in (pad, pad))]
    padded = aten.constant_pad_nd.default(x.permute(last), amounts, 0)
    seen_by = gradient.permute(last)
    parts = []
    for place in itertools.product(*map(range, window.kernel)):
        piece = padded
        for i, step in enumerate(stride):
            piece = part_of(piece, 1 + i, dilation[i] * place[i], gradient.shape[2 + i], step)
        parts.append(_products_of_channels(seen_by, piece, groups))
    whole = torch.cat([part.unsqueeze(-1) for part in parts], -1)
    result: torch.Tensor = aten.view.default(whole, [*weight.shape])
    return result


def _products_of_channels(x: torch.Tensor, y: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum the products of channels over all places: of [..., F] and [..., C], [F, C / groups]."""
    *places, features = x.shape
    channels = y.shape[-1]
    if groups == features == channels:
        return (x * y).sum([*range(len(places))]).unsqueeze(-1)
    rows = math.prod(places)
    if groups == 1:
        of_x = aten.view.default(x.contiguous(), [rows, features])
        return torch.mm(of_x.t(), aten.view.default(y.contiguous(), [rows, channels]))
    of_x = aten.view.default(x.contiguous(), [rows, groups, features // groups])
    of_y = aten.view.default(y.contiguous(), [rows, groups, channels // groups])
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
    padded = aten.constant_pad_nd.default(gradient.permute(to_last(x.dim())), amounts, 0)
    phases = []
    for found in itertools.product(*seeing):
        pieces, places = [], []
        for chosen in itertools.product(*found):
            piece, places_of = padded, weight
            for i, (place, offset) in enumerate(chosen):
                piece = part_of(piece, 1 + i, offset, sizes[i])
                places_of = places_of.select(2, place)
            pieces.append(piece)
            places.append(places_of)
        if pieces:
            phases.append(_products_of_places(pieces, places, groups))
        else:  # between windows
            all_sizes = [x.shape[0], *sizes, x.shape[1]]
            phases.append(aten.full.default(all_sizes, 0.0, dtype=gradient.dtype))
    return _interleaved(phases, stride, x)


def _products_of_places(
    pieces: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], groups: int
) -> torch.Tensor:
    """Sum what each place saw, [N, ..., F], times its weight, [F, C / groups]: [N, ..., C]."""
    *places, features = pieces[0].shape
    channels = weights[0].shape[1] * groups
    if groups == features == channels:
        pairs = zip(pieces, weights, strict=True)
        return functools.reduce(torch.add, [piece * w.squeeze(1) for piece, w in pairs])
    rows, width = math.prod(places), features // groups
    if groups == 1:
        flat = aten.view.default(torch.cat([*pieces], -1), [rows, len(pieces) * width])
        y = torch.mm(flat, torch.cat([*weights], 0))
    else:
        apart = [*places, groups, width]
        seen = torch.cat([aten.view.default(p.contiguous(), apart) for p in pieces], -1)
        flat = aten.view.default(seen, [rows, groups, len(pieces) * width])
        of_group = torch.cat([w.reshape(groups, width, -1) for w in weights], 1)
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

"""Convolutions as matrix products and as sums, for code generators that do these better.

IREE's CPU code of a convolution along one dimension is 9 to 25 times as slow as eager's, and that
of one of each channel by itself up to 13 times as slow as these (`ci/bench_rewrites.py`). That of
images reads all of the weight for a few places at a time: where ResNet-18's are of 7x7, it makes a
seventh of the FLOP/s of a product.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowering.decompositions.convolution import spread
from lowering.decompositions.halves import widened
from lowering.rewrites.rule import Rule
from lowering.sizes import of_each

aten = torch.ops.aten
_UNCHANGED: Any = NotImplemented
# With more places in a window, writing all of them out costs more than it gains.
_MOST_PLACES = 32
# Up to here a window of an image is written out: ResNet-18 takes 0.57 of the time with 256 (16x16)
# and with 800; at batch 8, 0.63 and 0.75.
_SMALL_IMAGE = 256


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """Rewrite `aten.convolution` along one dimension, of some images, or of each channel by itself.

    Before: %y = convolution(%x, %w, %b, ...)          with %x of [N, C, L], %w of [F, C, K]
    After:  %c = cat([slice(%x, 2, 0, ...), slice(%x, 2, 1, ...), ...], 1)       [N, K * C, M]
            %y = matmul(view(permute(%w, [0, 2, 1]), [F, K * C]), %c) + view(%b, [F, 1])

    Images are columns side by side. They are rewritten where the windows are of one element, or
    next to each other, or the images are small:

    After:  %c = view(permute(cat([slice(%x, ...), ...], 1), [1, 0, 2, 3]), [K * C, N * M])
            %y = permute(view(mm(view(permute(%w, ...), [F, K * C]), %c), [F, N, ...]), ...)

    A channel by itself (`groups` is C and F) is a sum of products, without the copy:

    After:  %y = slice(%x, 2, 0, ...) * %w[:, 0, 0] + slice(%x, 2, 1, ...) * %w[:, 0, 1] + ...

    Args:
        x: `[N, C, L]` or `[N, C, H, W]`, of floats; of float32, if it is images.
        weight: `[F, C / groups, ...]`.
        bias: `[F]` or None.
        stride, padding, dilation: of the window.
        transposed: left as it is.
        output_padding: of transposed ones.
        groups: 1, or C and F.
    """
    if transposed:
        return _UNCHANGED
    window = weight.shape[2:], stride, padding, dilation
    wide, wide_weight, is_small = widened(x), widened(weight), _is_small(x, weight)
    if is_small and groups == x.shape[1] == weight.shape[0] and x.dim() < 5:
        y = _by_channel(_windows(wide, *window), wide_weight)
    elif is_small and groups == 1 and x.dim() == 3:
        y = _product(_windows(wide, *window), wide_weight)
    elif groups == 1 and _is_images(x, weight):
        columns = _columns(x, *window)
        if columns is None:
            return _UNCHANGED
        y = torch.mm(_rows(weight.flatten(2)), columns.flatten(1))
        y = y.view(-1, *columns.shape[1:]).transpose(0, 1)
    else:
        return _UNCHANGED
    if bias is not None:
        y = y + bias.to(y.dtype).view(-1, *[1] * (x.dim() - 2))
    return y.to(x.dtype)


def convolution_backward(
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
    """Rewrite `aten.convolution_backward` of what `convolution` writes as a product.

    Before: %gx, %gw, %gb = convolution_backward(%g, %x, %w, ...)             with %g of [N, F, M]
    After:  %gw = sum over N of matmul(%g, permute(%c, [0, 2, 1])), with %c as in `convolution`
            %1 = matmul(view(permute(%w, [2, 1, 0]), [K * C, F]), %g)               [N, K * C, M]
            %gx = the sum of the K parts of %1, each put where its place of the window stood
            %gb = sum(%g, [0, 2])
    """
    if transposed or groups != 1 or x.dim() != 3 or not _is_small(x, weight):
        return _UNCHANGED
    kinds = x.dtype, weight.dtype
    gradient, x, weight = widened(gradient), widened(x), widened(weight)
    features, channels, places = weight.shape
    of_x = of_weight = of_bias = None
    if output_mask[0]:
        columns = torch.matmul(_rows(weight).t(), gradient)
        parts = [columns.narrow(1, i * channels, channels) for i in range(places)]
        of_x = _put_back(parts, x.shape[2], stride, padding, dilation).to(kinds[0])
    if output_mask[1]:
        pieces = _windows(x, [places], stride, padding, dilation)
        columns = torch.cat(pieces, 1).transpose(0, 1).reshape(places * channels, -1)
        whole = torch.mm(gradient.transpose(0, 1).reshape(features, -1), columns.t())
        of_weight = whole.view(features, places, channels).permute(0, 2, 1).to(kinds[1])
    if output_mask[2]:
        of_bias = gradient.sum([0, 2]).to(kinds[1])
    return of_x, of_weight, of_bias


def _is_small(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether all places of a window can be written out."""
    if not x.dtype.is_floating_point or 0 in (*x.shape, *weight.shape):
        return False
    return math.prod(weight.shape[2:]) <= _MOST_PLACES


def _is_images(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.dim() == 4 and x.dtype == torch.float32 and 0 not in (*x.shape, *weight.shape)


def _columns(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor | None:
    """Give what the windows of images see, `[K * C, N, ...]`; None where that gains nothing."""
    count, channels, height, width = x.shape
    steps, pads, apart = (of_each(v, 2) for v in (stride, padding, dilation))
    places = math.prod(kernel)
    if places > 1 and steps == [*kernel] and not any(pads) and apart == [1, 1]:
        rows, columns = height // steps[0], width // steps[1]
        whole = x.narrow(2, 0, rows * steps[0]).narrow(3, 0, columns * steps[1])
        tiles = whole.reshape(count, channels, rows, steps[0], columns, steps[1])
        return tiles.permute(3, 5, 1, 0, 2, 4).reshape(-1, count, rows, columns)
    if places == 1 or (height * width <= _SMALL_IMAGE and places <= _MOST_PLACES):
        pieces = _windows(x, kernel, stride, padding, dilation)
        return torch.cat(pieces, 1).transpose(0, 1)
    return None


def _windows(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[torch.Tensor]:
    """Give for each place of a window what is there, wherever it stands: `[N, C, ...]` each."""
    rank = x.dim() - 2
    steps, pads, apart = (of_each(v, rank) for v in (stride, padding, dilation))
    amounts = [amount for pad in reversed(pads) for amount in (pad, pad)]
    padded = aten.constant_pad_nd.default(x, amounts, 0) if any(pads) else x
    pieces = []
    for place in itertools.product(*map(range, kernel)):
        piece = padded
        for d in range(rank):
            start = apart[d] * place[d]
            end = start + padded.shape[2 + d] - apart[d] * (kernel[d] - 1)
            piece = aten.slice.Tensor(piece, 2 + d, start, end, steps[d])
        pieces.append(piece)
    return pieces


def _put_back(
    parts: Sequence[torch.Tensor],
    size: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """Add up what `_windows` takes apart: `[N, C, size]`."""
    (step,), (pad,), (apart,) = (of_each(v, 1) for v in (stride, padding, dilation))
    whole: list[torch.Tensor] = []
    for place, part in enumerate(parts):
        wide = spread(part, 2, step)
        start = apart * place - pad
        end = start + wide.shape[2]
        if start < size and end > 0:  # else it is in the padding
            whole.append(aten.constant_pad_nd.default(wide, [start, size - end], 0))
    if not whole:
        return torch.zeros(*parts[0].shape[:2], size, dtype=parts[0].dtype)
    return functools.reduce(torch.add, whole)


def _rows(weight: torch.Tensor) -> torch.Tensor:
    """Lay out a weight as the rows of a product, `[F, K * C]`."""
    return weight.permute(0, 2, 1).reshape(weight.shape[0], -1)


def _product(pieces: Sequence[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    columns = torch.cat(list(pieces), 1)
    if columns.shape[0] == 1:
        return torch.mm(_rows(weight), columns[0]).unsqueeze(0)
    return torch.matmul(_rows(weight), columns)


def _by_channel(pieces: Sequence[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    sizes = -1, *[1] * (weight.dim() - 2)
    places = weight.flatten(1).unbind(1)
    products = [p * w.view(sizes) for p, w in zip(pieces, places, strict=True)]
    return functools.reduce(torch.add, products)


RULES: Mapping[Any, Rule] = {
    aten.convolution.default: Rule(convolution),
    aten.convolution_backward.default: Rule(convolution_backward),
}

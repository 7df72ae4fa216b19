"""Convolutions as matrix products and as sums, for code generators that do these better.

IREE's CPU code of a convolution along one dimension is 9 to 25 times as slow as eager's
(`ci/bench_rewrites.py`). That of images reads all of the weight for a few places at a time: where
ResNet-18's are of 7x7, it makes a seventh of the FLOP/s of a product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from lowering.cpu import known_to_have
from lowering.decompositions import volumes
from lowering.decompositions.halves import HALVES, widened
from lowering.rewrites.recorder import part_of
from lowering.rewrites.windows import MOST_PLACES, Window, to_first, to_last, windows
from lowering.sizes import are_empty, are_known, is_static

aten = torch.ops.aten
# Up to here a window of an image is written out: ResNet-18 takes 0.57 of the time with 256 (16x16)
# and with 800; at batch 8, 0.63 and 0.75.
_SMALL_IMAGE = 256
# Images and features of a block that registers hold of any CPU that has them, but for one with a
# matrix unit (`lowering.stages.linalg.mark_convolutions`).
_IMAGES, _FEATURES = (4, 5, 6), 16
_VECTORS, _MATRIX_UNIT = ("avx2", "fma"), ("amx-tile", "amx-bf16")
# Of halves, a product is so much faster (3x3 on 56x56, 64 channels, in bf16: 1.0 ms instead of 3.8,
# two cores of an EPYC, Zen 4; and compiled in 2.6 s instead of 31) that larger ones are, too.
_MOST_BYTES_OF_HALVES = 64 << 20
_STRIP = 8  # places of a row that are computed together, where its width is not known


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: Window,
    groups: int,
) -> Any:
    """Rewrite a convolution along one dimension, of images, or of volumes.

    Before: %y = convolution(%x, %w, %b, ...)          with %x of [N, C, L], %w of [F, C, K]
    After:  %p = permute(%x, [0, 2, 1]); %v = view(permute(%w, [0, 2, 1]), [F, K * C])
            %c = cat([slice(%p, 1, 0, ...), slice(%p, 1, 1, ...), ...], -1)      [N, M, K * C]
            %y = permute(view(mm(view(%c, [N * M, K * C]), permute(%v, [1, 0])), ...) + %b, ...)

    Channels are last; what lies between two of them stays so (`lowering.rewrites.channels_last`).
    Images are written so where the windows are of one element, or next to each other, or the
    images are small; volumes are images (`lowering.decompositions.volumes`). Of each channel by
    itself (`groups` is C and F), it is a sum of products, but for images of float32. Groups of
    halves are convolved as floats.

    After:  %y = permute(slice(%p, 1, 0, ...) * %w[:, 0, 0] + slice(%p, 1, 1, ...) * ..., ...)

    Args:
        x: `[N, C, L]`, `[N, C, H, W]` or `[N, C, D, H, W]`, of floats; of at most 32 bits, if it
            is images.
        weight: `[F, C / groups, ...]`.
        bias: `[F]` or None.
        window: of the convolution.
        groups: 1, or C and F; of images of halves, any.
    """
    if not is_static(weight):
        return NotImplemented
    if groups == 1 and _is_volumes(x, weight):
        whole = volumes.convolution(x, weight, window[1:], _convolved_images)
        return whole if bias is None else whole + bias.view(-1, 1, 1, 1)
    can_write = is_small(x, weight)
    last = x.permute(to_last(x.dim()))
    y: Any = NotImplemented
    is_known = are_known(last.shape[1:-1])
    if can_write and is_known and groups == x.shape[1] == weight.shape[0]:
        y = _by_channel(last, weight, window) if _is_sum(x) else NotImplemented
    elif groups > 1 and x.dtype in HALVES and x.dim() == 4 and is_known:
        y = convolved(widened(x), widened(weight), window, groups).permute(to_last(4))
    elif groups == 1 and ((can_write and x.dim() == 3) or is_images(x, weight)):
        y = _product(last, weight, window)
        if y is NotImplemented and not are_known(last.shape[2:3]):
            y = _in_strips(widened(last), widened(weight), window)
    if y is NotImplemented:
        return y
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.permute(to_first(x.dim())).to(x.dtype)


def convolved(x: torch.Tensor, weight: torch.Tensor, window: Window, groups: int) -> torch.Tensor:
    """Convolve in the best form that there is."""
    found: Any = convolution(x, weight, None, window, groups)
    if found is NotImplemented:
        places = (*window[1:], False, [0] * (x.dim() - 2), groups)
        found = aten.convolution.default(x, weight, None, *places)
    return found  # type: ignore[no-any-return]


def _convolved_images(
    x: torch.Tensor, weight: torch.Tensor, places: volumes.Window
) -> torch.Tensor:
    return convolved(x, weight, Window(weight.shape[2:], *places), 1)


def _is_sum(x: torch.Tensor) -> bool:
    """Say whether a convolution of each channel by itself is a sum of products.

    One of images of float32 with channels last, IREE computes in registers (96 channels of 56x56,
    two cores of an EPYC, Zen 3: 0.6 ms where the sum takes 1.4 for 3x3, and 0.65 for 4.0, 5x5).
    """
    return x.dim() == 3 or (x.dim() == 4 and x.dtype is not torch.float32)


def _is_volumes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether these are volumes, of which windows see a few planes."""
    is_taken = x.dtype.is_floating_point and are_known(x.shape[1:]) and not are_empty(x, weight)
    return x.dim() == 5 and is_taken and weight.shape[2] <= volumes.MOST_PLANES


def is_small(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether all places of a window can be written out."""
    if not x.dtype.is_floating_point or are_empty(x, weight):
        return False
    return math.prod(weight.shape[2:]) <= MOST_PLACES


def is_images(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether these are images of floats of at most 32 bits, and the weight of a window."""
    is_taken = x.dtype in (torch.float32, *HALVES)
    return x.dim() == 4 and is_taken and not are_empty(x, weight)


def _product(x: torch.Tensor, weight: torch.Tensor, window: Window) -> Any:
    """Multiply what the windows see, `[N, ..., K * C]`; not where that gains nothing."""
    count, *sizes, channels = x.shape
    stride, places = window.stride, math.prod(window.kernel)
    if len(sizes) == 2 and places > 1 and window.are_side_by_side:
        (rows, columns), (height, width) = (
            (n // s for n, s in zip(sizes, stride, strict=True)),
            stride,
        )
        whole = part_of(part_of(x, 1, 0, rows * height), 2, 0, columns * width).contiguous()
        tiles = aten.view.default(whole, [count, rows, height, columns, width, channels])
        apart = tiles.permute(0, 1, 3, 2, 4, 5).contiguous()
        seen = aten.view.default(apart, [count, rows, columns, places * channels])
    elif len(sizes) == 1 or places == 1 or _writes_windows(x, weight, window):
        pieces = windows(x, window)
        seen = torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0]
    else:
        return NotImplemented
    return multiplied(seen, weight)


def _writes_windows(x: torch.Tensor, weight: torch.Tensor, window: Window) -> bool:
    _, *sizes, _ = x.shape
    if not is_worth_writing(x, sizes, math.prod(window.kernel)):
        return False
    made = [
        (size + 2 * pad - apart * (seen - 1) - 1) // step + 1
        for size, seen, step, pad, apart in zip(sizes, *window, strict=True)
    ]
    return not is_left_to_blocks(x, weight.shape[:2], window.kernel, made)


def is_left_to_blocks(
    x: torch.Tensor,
    channels: Sequence[int],
    kernel: Sequence[int],
    sizes: Sequence[int],
) -> bool:
    """Say whether a convolution of images is left whole, to blocks that registers hold.

    Those of several images skip padding; those of a row take any features, and one channel.

    Args:
        x: the images, or the gradient of such.
        channels: of what is made, and of what is read.
        kernel: how high and wide a window is.
        sizes: how high and wide what is made is.
    Source: what `lowering.stages.linalg.mark_convolutions` takes, on each kind of CPU that it is
        for.
    """
    made, read = channels
    is_large = min(*kernel, *sizes) > 1 and math.prod(kernel) <= math.prod(sizes)
    if x.dtype is not torch.float32 or not known_to_have(_VECTORS) or not is_large:
        return False
    if made % _FEATURES or read == 1:
        return True
    are_known_images = are_known(x.shape[:1]) and not known_to_have(_MATRIX_UNIT)
    return are_known_images and any(x.shape[0] % n == 0 for n in _IMAGES)


def is_worth_writing(x: torch.Tensor, sizes: Sequence[int], places: int) -> bool:
    """Say whether all that windows of images see is to be written out.

    Args:
        x: the images.
        sizes: how high and wide they are.
        places: of a window.
    """
    if not are_known(sizes) or places > MOST_PLACES:
        return False
    if x.dtype in HALVES:
        return are_known(x.shape) and places * x.numel() * x.element_size() <= _MOST_BYTES_OF_HALVES
    return math.prod(sizes) <= _SMALL_IMAGE


def _in_strips(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """Convolve strips of images of any width, each of them of `_STRIP` places of the result.

    IREE computes vectors of places only if a row has a known number of them.

    Before: %y = convolution(%x, %w, ...)          with %x of [N, C, H, W], %w of [F, C, KH, KW]
    After:  %s = the columns that a strip sees, [N * Q, C, H, S], for Q strips
            %y = slice(view(permute(convolution(%s, %w, ...)), [N, M, Q * 8, F]), 2, 0, L)

    Args:
        x: `[N, H, W, C]`.
    """
    count, height, width, channels = x.shape
    _, (_, step), (above, left), (_, between) = window
    reach = between * (window.kernel[1] - 1) + 1  # columns that a window sees
    made = (width + 2 * left - reach) // step + 1
    strips = (made + _STRIP - 1) // _STRIP
    own, beyond = _STRIP * step, max(reach - step, 0)  # columns of a strip, and of those after it
    more = -(-(beyond + step) // own)  # strips after the last, of whose columns that one sees some
    right = left - reach + (_STRIP + more * _STRIP) * step
    padded = aten.constant_pad_nd.default(x, [0, 0, left, right, above, above], 0)
    rows = height + 2 * above
    columns = part_of(padded, 2, 0, (strips + more) * own)
    whole = aten.view.default(columns, [count, rows, strips + more, own, channels])
    parts = [aten.slice.Tensor(whole, 2, 0, strips)]
    for i in range(1, more + 1):
        if (needed := min(beyond - (i - 1) * own, own)) > 0:
            part = aten.slice.Tensor(whole, 2, i, strips + i)
            parts.append(aten.slice.Tensor(part, 3, 0, needed))
    seen = torch.cat(parts, 3).permute(0, 2, 1, 3, 4).contiguous()
    images = aten.view.default(seen, [count * strips, rows, own + beyond, channels])
    steps = window.stride, [0, 0], window.dilation
    y = aten.convolution.default(
        images.permute(to_first(4)), weight, None, *steps, False, [0, 0], 1
    ).permute(to_last(4))
    high, features = y.shape[1], weight.shape[0]
    apart = aten.view.default(y, [count, strips, high, _STRIP, features])
    row = apart.permute(0, 2, 1, 3, 4).contiguous()
    row = aten.view.default(row, [count, high, strips * _STRIP, features])
    return part_of(row, 2, 0, made)


def multiplied(seen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply what windows saw, `[N, ..., K * C]`, by a weight, `[F, C, ...]`, in floats."""
    *places, width = seen.shape
    rows = aten.view.default(seen.contiguous(), [math.prod(places), width])
    y = torch.mm(widened(rows), widened(rows_of(weight.flatten(2)).t()))
    whole: torch.Tensor = aten.view.default(y, [*places, weight.shape[0]])
    return whole


def _by_channel(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    # Rows of one place each, which vectors read. Halves are widened last: IREE does that anew
    # wherever it is read, of all there is to slice.
    places = widened(weight).flatten(1).t().contiguous().unbind(0)
    pieces = map(widened, windows(x, window))
    products = [piece * place for piece, place in zip(pieces, places, strict=True)]
    return functools.reduce(torch.add, products)


def rows_of(weight: torch.Tensor) -> torch.Tensor:
    """Lay out a weight as the rows of a product, `[F, K * C]`."""
    return weight.permute(0, 2, 1).reshape(weight.shape[0], -1)

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

from lowering.decompositions.convolution import spread, spread_all, unread
from lowering.decompositions.halves import HALVES, widened
from lowering.rewrites.recorder import first_of
from lowering.rewrites.rule import Rule
from lowering.rewrites.windows import MOST_PLACES, Window, to_first, to_last, windows
from lowering.sizes import are_known, is_static

aten = torch.ops.aten
_UNCHANGED: Any = NotImplemented
# Up to here a window of an image is written out: ResNet-18 takes 0.57 of the time with 256 (16x16)
# and with 800; at batch 8, 0.63 and 0.75.
_SMALL_IMAGE = 256
# Of halves, a product is so much faster (3x3 on 56x56, 64 channels, in bf16: 1.0 ms instead of 3.8,
# two cores of an EPYC, Zen 4; and compiled in 2.6 s instead of 31) that larger ones are, too.
_MOST_BYTES_OF_HALVES = 64 << 20
# For the gradient of the weight, places of a window, and bytes of what all windows saw. Next to
# each other, torch-mlir's convolution over the batch takes up to 1.3 times as long as the product;
# apart, 10 to 30 times.
_MOST_PLACES_OF_GRADIENT = 64
_STRIP = 8  # places of a row that are computed together, where its width is not known
_MOST_PHASES = 16  # places between two windows, for the gradient of the input
_MOST_BYTES_OF_WINDOWS = {False: 64 << 20, True: 1 << 30}


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
    After:  %p = permute(%x, [0, 2, 1]); %v = view(permute(%w, [0, 2, 1]), [F, K * C])
            %c = cat([slice(%p, 1, 0, ...), slice(%p, 1, 1, ...), ...], -1)      [N, M, K * C]
            %y = permute(view(mm(view(%c, [N * M, K * C]), permute(%v, [1, 0])), ...) + %b, ...)

    Channels are last; what lies between two of them stays so (`lowering.rewrites.channels_last`).
    Images are written so where the windows are of one element, or next to each other, or the
    images are small. A channel by itself (`groups` is C and F) is a sum of products:

    After:  %y = permute(slice(%p, 1, 0, ...) * %w[:, 0, 0] + slice(%p, 1, 1, ...) * ..., ...)

    Args:
        x: `[N, C, L]` or `[N, C, H, W]`, of floats; of at most 32 bits, if it is images.
        weight: `[F, C / groups, ...]`.
        bias: `[F]` or None.
        stride, padding, dilation: of the window.
        transposed: left as it is.
        output_padding: of transposed ones.
        groups: 1, or C and F.
    """
    if transposed or not is_static(weight):
        return _UNCHANGED
    window = Window.of(x.dim() - 2, weight.shape[2:], stride, padding, dilation)
    is_small = _is_small(x, weight)
    last = x.permute(to_last(x.dim()))
    y = _UNCHANGED
    is_known = are_known(last.shape[1:-1])
    if is_small and is_known and groups == x.shape[1] == weight.shape[0] and x.dim() < 5:
        y = _by_channel(last, weight, window)
    elif groups == 1 and ((is_small and x.dim() == 3) or _is_images(x, weight)):
        y = _product(last, weight, window)
        if y is _UNCHANGED and not are_known(last.shape[2:3]):
            y = _in_strips(widened(last), widened(weight), window)
    if y is _UNCHANGED:
        return y
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.permute(to_first(x.dim())).to(x.dtype)


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

    Of images, the input's gradient is a convolution of the gradient with the flipped weight, or,
    with strides, several products (`_gradient_by_phases`). What is best left to torch-mlir
    (`_MOST_BYTES_OF_WINDOWS`) stays a `convolution_backward`.

    Before: %gx, %gw, %gb = convolution_backward(%g, %x, %w, ...)             with %g of [N, F, M]
    After:  %gw = sum over N of matmul(%g, permute(%c, [0, 2, 1])), with %c as in `convolution`
            %1 = matmul(view(permute(%w, [2, 1, 0]), [K * C, F]), %g)               [N, K * C, M]
            %gx = the sum of the K parts of %1, each put where its place of the window stood
            %gb = sum(%g, [0, 2])
    """
    is_images = _is_images(x, weight)
    if transposed or groups != 1 or not (is_images or (x.dim() == 3 and _is_small(x, weight))):
        return _UNCHANGED
    kinds = x.dtype, weight.dtype
    gradient, x, weight = widened(gradient), widened(x), widened(weight)
    window = Window.of(x.dim() - 2, weight.shape[2:], stride, padding, dilation)
    of_x = of_weight = of_bias = None
    is_written_out = not is_images or _can_write_windows(gradient, weight, window)
    is_dense = not is_images or _is_without_zeros(window)
    wanted = [output_mask[0] and not is_dense, output_mask[1] and not is_written_out, False]
    if any(wanted):  # of images, what the code generator does as well by itself
        places = (*window[1:], False, output_padding, 1)
        found = aten.convolution_backward.default(gradient, x, weight, bias_sizes, *places, wanted)
        of_x = found[0].to(kinds[0]) if wanted[0] else None
        of_weight = found[1].to(kinds[1]) if wanted[1] else None
    if output_mask[0] and is_dense:
        of_input = _gradient_of_images if is_images else _gradient_of_rows
        of_x = of_input(gradient, x, weight, window).to(kinds[0])
    if output_mask[1] and is_written_out:
        of_weight = _gradient_of_weight(gradient, x, weight, window).to(kinds[1])
    if output_mask[2]:
        of_bias = gradient.sum([0, *range(2, x.dim())]).to(kinds[1])
    return of_x, of_weight, of_bias


def _is_small(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether all places of a window can be written out."""
    if not x.dtype.is_floating_point or 0 in (*x.shape, *weight.shape):
        return False
    return math.prod(weight.shape[2:]) <= MOST_PLACES


def _is_images(x: torch.Tensor, weight: torch.Tensor) -> bool:
    is_taken = x.dtype in (torch.float32, *HALVES)
    return x.dim() == 4 and is_taken and 0 not in (*x.shape, *weight.shape)


def _can_write_windows(gradient: torch.Tensor, weight: torch.Tensor, window: Window) -> bool:
    """Say whether all that windows saw is to be written out, for the gradient of the weight."""
    features, channels, *kernel = weight.shape
    places = math.prod(kernel)
    nbytes = gradient.numel() // features * places * channels * gradient.element_size()
    are_apart = math.prod(window.stride) > 1
    return places <= _MOST_PLACES_OF_GRADIENT and nbytes <= _MOST_BYTES_OF_WINDOWS[are_apart]


def _product(x: torch.Tensor, weight: torch.Tensor, window: Window) -> Any:
    """Multiply what the windows see, `[N, ..., K * C]`; not where that gains nothing."""
    count, *sizes, channels = x.shape
    kernel, stride, padding, dilation = window
    places = math.prod(kernel)
    are_apart = [*stride] == [*kernel] and not any(padding) and {*dilation} == {1}
    if len(sizes) == 2 and places > 1 and are_apart:
        (rows, columns), (height, width) = (
            (n // s for n, s in zip(sizes, stride, strict=True)),
            stride,
        )
        whole = first_of(first_of(x, 1, rows * height), 2, columns * width).contiguous()
        tiles = aten.view.default(whole, [count, rows, height, columns, width, channels])
        apart = tiles.permute(0, 1, 3, 2, 4, 5).contiguous()
        seen = aten.view.default(apart, [count, rows, columns, places * channels])
    elif (
        len(sizes) == 1
        or places == 1
        or (are_known(sizes) and places <= MOST_PLACES and _is_worth_writing(x, sizes, places))
    ):
        pieces = windows(x, window)
        seen = torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0]
    else:
        return _UNCHANGED
    return _multiplied(seen, weight)


def _is_worth_writing(x: torch.Tensor, sizes: Sequence[int], places: int) -> bool:
    """Say whether all that windows of images see is to be written out."""
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
    columns = first_of(padded, 2, (strips + more) * own)
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
    return first_of(row, 2, made)


def _multiplied(seen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply what windows saw, `[N, ..., K * C]`, by a weight, `[F, C, ...]`, in floats."""
    *places, width = seen.shape
    rows = aten.view.default(seen, [math.prod(places), width])
    y = torch.mm(widened(rows), widened(_rows(weight.flatten(2)).t()))
    whole: torch.Tensor = aten.view.default(y, [*places, weight.shape[0]])
    return whole


def _by_channel(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    # Rows of one place each, which vectors read. Halves are widened last: IREE does that anew
    # wherever it is read, of all there is to slice.
    places = widened(weight).flatten(1).t().contiguous().unbind(0)
    pieces = map(widened, windows(x, window))
    products = [piece * place for piece, place in zip(pieces, places, strict=True)]
    return functools.reduce(torch.add, products)


def _is_without_zeros(window: Window) -> bool:
    """Say whether the gradient of images is written as what reads no zeros between two windows."""
    kernel, stride, _, dilation = window
    if 1 in (math.prod(kernel), math.prod(stride)):
        return True
    places = math.prod(-(-size // step) for size, step in zip(kernel, stride, strict=True))
    is_little = math.prod(stride) <= _MOST_PHASES and places <= MOST_PLACES
    return is_little and {*dilation} == {1}


def _gradient_of_images(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, window: Window
) -> torch.Tensor:
    """Convolve the gradient with the flipped weight; of one element, spread the product."""
    kernel, *places = window
    is_single = math.prod(kernel) == 1
    if not is_single and math.prod(window.stride) > 1:
        return _gradient_by_phases(gradient, x, weight, window)
    rest = unread(gradient.shape[2:], x.shape[2:], kernel, *places)
    seen = gradient if is_single else spread_all(gradient, *window, rest)
    flipped = weight.transpose(0, 1).flip([2, 3])
    args = (seen, flipped, None, [1, 1], [0, 0], window.dilation, False, [0, 0], 1)
    y = convolution(*args)
    if y is _UNCHANGED:
        y = aten.convolution.default(*args)
    return spread_all(y, *window, rest) if is_single else y


def _gradient_by_phases(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, window: Window
) -> torch.Tensor:
    """Convolve the gradient for each place that an element may have between two windows.

    With a stride of 2, an even row of the padded input is seen by the even rows of the weight, an
    odd one by the odd rows. Of the spread gradient, three of four elements would be zeros: of 3x3,
    it takes twice as long (`ci/bench_rewrites.py`).

    Before: %gx = convolution_backward(%g, %x, %w, stride [2, 2])       with %w of [F, C, 3, 3]
    After:  four convolutions of %g, as products, with weights of [C, F, 2, 2], [C, F, 2, 1],
            [C, F, 1, 2] and [C, F, 1, 1], and each one's rows and columns between the others'
    """
    (height, width), (down, across) = x.shape[2:], window.stride
    flipped = weight.flip([2, 3]).transpose(0, 1)
    starts = itertools.product(range(down), range(across))
    phases = [_phase(gradient, flipped, x, window, start) for start in starts]
    count, rows, columns, channels = phases[0].shape
    whole = torch.cat(phases, -1)
    apart = whole.view(count, rows, columns, down, across, channels).transpose(2, 3)
    placed = apart.reshape(count, rows * down, columns * across, channels)
    return placed.narrow(1, 0, height).narrow(2, 0, width).permute(to_first(4))


def _phase(
    gradient: torch.Tensor,
    flipped: torch.Tensor,
    x: torch.Tensor,
    window: Window,
    starts: Sequence[int],
) -> torch.Tensor:
    """Give every `stride`-th row and column of the input's gradient, from `starts` on.

    Returns:
        `[N, H, W, C]`.
    """
    seen_by, sizes, is_seen = flipped, [], True
    amounts: list[int] = []
    for i, (start, step, pad) in enumerate(zip(starts, window.stride, window.padding, strict=True)):
        size, there = -(-x.shape[2 + i] // step), gradient.shape[2 + i]
        ahead, first = divmod(start + pad, step)
        last = window.kernel[i] - 1 - first
        seen_by = aten.slice.Tensor(seen_by, 2 + i, last % step, max(last + 1, 0), step)
        begin, end = ahead + 1 - seen_by.shape[2 + i], ahead + size
        is_seen = is_seen and seen_by.shape[2 + i] > 0 and begin < there
        amounts = [-begin, end - there, *amounts]
        sizes.append(size)
    if not is_seen:  # between windows, or of those that see padding alone
        return torch.zeros(x.shape[0], *sizes, x.shape[1], dtype=x.dtype)
    seen = aten.constant_pad_nd.default(gradient, amounts, 0)
    places = Window(seen_by.shape[2:], [1, 1], [0, 0], [1, 1])
    written = torch.cat(windows(seen.permute(to_last(4)), places), -1)
    return _multiplied(written, seen_by)


def _gradient_of_rows(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, window: Window
) -> torch.Tensor:
    """Multiply the gradient by the weight, and put each place of the window where it stood."""
    _, channels, places = weight.shape
    columns = torch.matmul(_rows(weight).t(), gradient)
    parts = [columns.narrow(1, i * channels, channels) for i in range(places)]
    return _put_back(parts, x.shape[2], window)


def _gradient_of_weight(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, window: Window
) -> torch.Tensor:
    """Multiply the gradient, `[F, M]`, by what the windows saw, `[M, K * C]`."""
    features, channels, *_ = weight.shape
    seen = torch.cat(windows(x.permute(to_last(x.dim())), window), -1).flatten(0, -2)
    whole = torch.mm(gradient.transpose(0, 1).reshape(features, -1), seen)
    return whole.view(features, -1, channels).transpose(1, 2).reshape(weight.shape)


def _put_back(parts: Sequence[torch.Tensor], size: int, window: Window) -> torch.Tensor:
    """Add up what `windows` takes apart: `[N, C, size]`."""
    _, (step,), (pad,), (apart,) = window
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


RULES: Mapping[Any, Rule] = {
    aten.convolution.default: Rule(convolution, is_dynamic=True),
    aten.convolution_backward.default: Rule(convolution_backward),
}

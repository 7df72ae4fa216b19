"""Gradients of convolutions as products, for code generators that do these better.

torch-mlir lowers them for known sizes only, or without a stride, and not in groups. Of unknown
sizes, all that is asked of a size is what holds for each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowering.decompositions.halves import widened
from lowering.decompositions.spreading import spread
from lowering.rewrites.convolutions import is_images, is_small, rows_of
from lowering.rewrites.gradients_of_any_size import MOST_PLACES_OF_GRADIENT, of_any_size
from lowering.rewrites.gradients_of_input import gradient_of_input, is_without_zeros
from lowering.rewrites.rule import Rule
from lowering.rewrites.windows import Window, to_last, windows
from lowering.sizes import is_static

aten = torch.ops.aten
# The gradient of a weight is a convolution of images with it, if so many features are whole blocks
# (`lowering.stages.code.block_convolutions`), and there are so many images or pieces of them.
_FEATURES, _CHANNELS = 32, 4
# For the gradient of the weight, bytes of what all windows saw. Next to each other, torch-mlir's
# convolution over the batch takes up to 1.3 times as long as the product; apart, 10 to 30 times.
_MOST_BYTES_OF_WINDOWS = {False: 64 << 20, True: 1 << 30}


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

    Of images, the weight's gradient is a convolution of these with the gradient, or a product
    (`_pieces`); the input's is a convolution of the gradient with the flipped weight, or, with
    strides or of small ones, a product or several (`gradient_of_input`). What is best left to
    torch-mlir (`_MOST_BYTES_OF_WINDOWS`) stays a `convolution_backward`.

    Before: %gx, %gw, %gb = convolution_backward(%g, %x, %w, ...)             with %g of [N, F, M]
    After:  %gw = sum over N of matmul(%g, permute(%c, [0, 2, 1])), with %c as in `convolution`
            %1 = matmul(view(permute(%w, [2, 1, 0]), [K * C, F]), %g)               [N, K * C, M]
            %gx = the sum of the K parts of %1, each put where its place of the window stood
            %gb = sum(%g, [0, 2])
    """
    if not is_static(gradient, x, weight):
        places = stride, padding, dilation, transposed, output_padding, groups
        return of_any_size(gradient, x, weight, bias_sizes, *places, output_mask)
    are_images = is_images(x, weight)
    if transposed or groups != 1 or not (are_images or (x.dim() == 3 and is_small(x, weight))):
        return NotImplemented
    kinds = x.dtype, weight.dtype
    gradient, x, weight = widened(gradient), widened(x), widened(weight)
    window = Window.of(x.dim() - 2, weight.shape[2:], stride, padding, dilation)
    of_x = of_weight = of_bias = None
    pieces = _pieces(gradient, x, window) if are_images else None
    is_left = are_images and pieces is None and not _can_write_windows(gradient, weight, window)
    is_dense = not are_images or is_without_zeros(window, 1)
    wanted = [output_mask[0] and not is_dense, output_mask[1] and is_left, False]
    if any(wanted):  # of images, what the code generator does as well by itself
        places = (*window[1:], False, output_padding, 1)
        found = aten.convolution_backward.default(gradient, x, weight, bias_sizes, *places, wanted)
        of_x = found[0].to(kinds[0]) if wanted[0] else None
        of_weight = found[1].to(kinds[1]) if wanted[1] else None
    if output_mask[0] and is_dense:
        if are_images:
            of_x = gradient_of_input(gradient, x.shape[2:], weight, window, 1).to(kinds[0])
        else:
            of_x = _gradient_of_rows(gradient, x, weight, window).to(kinds[0])
    if output_mask[1] and pieces is not None:
        of_weight = _convolved_over_batch(gradient, x, window, pieces).to(kinds[1])
    elif output_mask[1] and not is_left:
        of_weight = _gradient_of_weight(gradient, x, weight, window).to(kinds[1])
    if output_mask[2]:
        of_bias = gradient.sum([0, *range(2, x.dim())]).to(kinds[1])
    return of_x, of_weight, of_bias


def _can_write_windows(gradient: torch.Tensor, weight: torch.Tensor, window: Window) -> bool:
    """Say whether all that windows saw is to be written out, for the gradient of the weight."""
    features, channels, *kernel = weight.shape
    places = math.prod(kernel)
    nbytes = gradient.numel() // features * places * channels * gradient.element_size()
    are_apart = math.prod(window.stride) > 1
    return places <= MOST_PLACES_OF_GRADIENT and nbytes <= _MOST_BYTES_OF_WINDOWS[are_apart]


def _gradient_of_rows(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, window: Window
) -> torch.Tensor:
    """Multiply the gradient by the weight, and put each place of the window where it stood."""
    _, channels, places = weight.shape
    columns = torch.matmul(rows_of(weight).t(), gradient)
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


def _pieces(gradient: torch.Tensor, x: torch.Tensor, window: Window) -> int | None:
    """Return in how many pieces `_convolved_over_batch` cuts images; None: it does not suit them.

    The innermost loop of a convolution is over channels, here images, of which there must be some.
    IREE drops dimensions of 1, and with these what it does for convolutions: 30 times as slow.
    """
    count, features, height, width = gradient.shape
    if features % _FEATURES or 1 in (x.shape[1], width, *window.kernel):
        return None
    options = (n for n in range(1, height // 2 + 1) if height % n == 0 and n * count >= _CHANNELS)
    return next(options, None)


def _convolved_over_batch(
    gradient: torch.Tensor, x: torch.Tensor, window: Window, pieces: int
) -> torch.Tensor:
    """Convolve the images with the gradient: channels are a batch, and images are channels.

    Nothing that windows saw is copied, nor packed: ResNet-18's step at batch 4 takes 260 ms instead
    of 306 (a Zen 4; eager 258 to 285).

    Before: %gw = convolution_backward(%g, %x, %w, ...)           with %w of [F, C, 3, 3], padding 1
    After:  %p = permute(constant_pad_nd(%x, [1, 1, 1, 1]), [1, 0, 2, 3])
            %gw = permute(convolution(%p, permute(%g, [1, 0, 2, 3])), [1, 0, 2, 3])

    Args:
        gradient: `[N, F, H, W]`.
        x: `[N, C, ...]`.
        window: of the convolution.
        pieces: of an image, with as many rows of the gradient each, which are images of their own.

    Returns:
        `[F, C, *kernel]`.
    """
    kernel, stride, padding, dilation = window
    count, features, height, width = gradient.shape
    rows = height // pieces
    reach = [apart * (size - 1) + 1 for size, apart in zip(kernel, dilation, strict=True)]
    amounts = list[int]()
    for i, size in enumerate((height, width)):
        read = (size - 1) * stride[i] + reach[i]  # what is further on, the convolution has not seen
        amounts = [padding[i], read - padding[i] - x.shape[2 + i], *amounts]
    seen = aten.constant_pad_nd.default(x, amounts, 0) if any(amounts) else x
    if pieces > 1:
        tops = range(0, height * stride[0], rows * stride[0])
        high = (rows - 1) * stride[0] + reach[0]
        seen = torch.cat([seen.narrow(2, top, high) for top in tops])
        cut = aten.view.default(gradient, [count, features, pieces, rows, width])
        cut = cut.permute(2, 0, 1, 3, 4).contiguous()
        gradient = aten.view.default(cut, [pieces * count, features, rows, width])
    swapped = [1, 0, 2, 3]
    images, weight = seen.permute(swapped), gradient.permute(swapped)
    places = dilation, [0, 0], stride, False, [0, 0], 1
    found: torch.Tensor = aten.convolution.default(images, weight, None, *places)
    return found.permute(swapped)


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


RULES: Mapping[Any, Rule] = {
    aten.convolution_backward.default: Rule(convolution_backward, is_dynamic=True),
}

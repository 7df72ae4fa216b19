"""Pooling whose windows do not end where its padded input does, in a form that IREE compiles.

torch-mlir refuses some windows that hang over the end (`ceil_mode`); where an end is never read and
the window stands in one place, IREE finds the sizes at odds with each other, as for convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowering.sizes import is_static, of_each

aten = torch.ops.aten
_UNCHANGED: Any = NotImplemented  # PyTorch then keeps the op whole


def max_pool2d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """Decompose `aten.max_pool2d_with_indices` so that its windows cover the padded input exactly.

    Before: max_pool2d_with_indices(%x, 3, 2, 1)                       with %x of [N, C, 2, 2]
    After:  %1 = constant_pad_nd(%x, [1, 0, 1, 0], -inf); max_pool2d_with_indices(%1, 3, 2, 0), and
            its indices counted in %x again
    """
    if not is_static(x) or 0 in x.shape:
        return _UNCHANGED
    stride = stride or kernel_size
    kernel, steps, pads, apart = (of_each(v, 2) for v in (kernel_size, stride, padding, dilation))
    sizes = [int(size) for size in x.shape[-2:]]
    amounts, is_irregular = [], ceil_mode or x.dim() == 3
    for size, k, step, pad, d in zip(sizes, kernel, steps, pads, apart, strict=True):
        count = _places(size, k, step, pad, d, ceil_mode)
        covered = (count - 1) * step + d * (k - 1) + 1
        amounts.append((pad, covered - size - pad))
        is_irregular |= count == 1 and covered < size + 2 * pad
    if not is_irregular:
        return _UNCHANGED
    batch = x if x.dim() == 4 else x.unsqueeze(0)
    padded = aten.constant_pad_nd.default(batch, [*amounts[1], *amounts[0]], _lowest(x.dtype))
    values, indices = aten.max_pool2d_with_indices.default(padded, kernel, steps, [0, 0], apart)
    width = padded.shape[-1]
    rows = torch.div(indices, width, rounding_mode="floor")
    columns = indices - rows * width
    row, column = (
        _place(place - before, d, size)
        for place, (before, _), d, size in zip((rows, columns), amounts, apart, sizes, strict=True)
    )
    indices = row * sizes[1] + column
    return (values, indices) if x.dim() == 4 else (values.squeeze(0), indices.squeeze(0))


def avg_pool2d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Decompose `aten.avg_pool2d` along dimensions in which its window stands in one place.

    Before: avg_pool2d(%x, 320, ceil_mode=True)                        with %x of [N, C, 7, 9]
    After:  %1 = sum(%x, [-2], True) / 7; sum(%1, [-1], True) / 9
    """
    if not is_static(x) or not x.dtype.is_floating_point:
        return _UNCHANGED
    kernel, steps, pads = (of_each(v, 2) for v in (kernel_size, stride or kernel_size, padding))
    once = []
    for i, size in enumerate(int(size) for size in x.shape[-2:]):
        is_plain = kernel[i] == size and not pads[i] and (not ceil_mode or size == 1)
        if is_plain or _places(size, kernel[i], steps[i], pads[i], 1, ceil_mode) != 1:
            continue
        seen, padded = min(size, kernel[i] - pads[i]), min(size + 2 * pads[i], kernel[i])
        total = torch.sum(aten.slice.Tensor(x, i - 2, 0, seen), [i - 2], True)
        count = padded if count_include_pad else seen
        x = total if divisor_override else total / count
        kernel[i], steps[i], pads[i] = 1, 1, 0
        once.append(i)
    if not once:
        return _UNCHANGED
    if len(once) == 2:
        return x / divisor_override if divisor_override else x
    return aten.avg_pool2d.default(
        x, kernel, steps, pads, ceil_mode, count_include_pad, divisor_override
    )


DECOMPOSITIONS = {
    aten.avg_pool2d.default: avg_pool2d,
    aten.max_pool2d_with_indices.default: max_pool2d,
}


def _places(size: int, kernel: int, step: int, pad: int, apart: int, ceil_mode: bool) -> int:
    """Count where a window stands along a dimension, as `pooling_output_shape` of PyTorch does."""
    room = size + 2 * pad - apart * (kernel - 1) - 1
    count = (room + (step - 1 if ceil_mode else 0)) // step + 1
    starts_outside = ceil_mode and (count - 1) * step >= size + pad
    return count - starts_outside


def _place(place: torch.Tensor, apart: int, size: int) -> torch.Tensor:
    """Move places in the padding to the first place of their window that is not.

    A window that holds nothing but the lowest value points at its first place.
    """
    first = torch.where(place < 0, torch.remainder(place, apart), place)
    return torch.clamp(first, 0, size - 1)


def _lowest(dtype: torch.dtype) -> float:
    return -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min

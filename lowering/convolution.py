"""Convolutions whose window stands in one place only, in a form that IREE compiles.

torch-mlir pads the input as PyTorch does; with a stride, a part at the end may never be read. Where
there is one place along a dimension, IREE drops the stride and then finds the sizes at odds with
each other ("inferred input/output operand #1 has shape's dimension #2 to be 4, but found 3").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten
_UNCHANGED: Any = NotImplemented  # PyTorch then keeps the op whole


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
    """Decompose `aten.convolution` where the end of the padded input is never read.

    Before: convolution(%x, %w, None, [2], [1], ...)        with %x of [N, C, 2], %w of [F, C, 3]
    After:  %1 = constant_pad_nd(%x, [1, 0]); convolution(%1, %w, None, [2], [0], ...)
    """
    if transposed or not all(isinstance(s, int) for s in (*x.shape, *weight.shape)):
        return _UNCHANGED
    rank = x.dim() - 2
    stride, padding, dilation = (_of_each(v, rank) for v in (stride, padding, dilation))
    pads, left = [], list(padding)
    for i, size in enumerate(x.shape[2:]):
        window = dilation[i] * (weight.shape[2 + i] - 1) + 1
        unread = size + 2 * padding[i] - window
        is_one_place = 0 < unread < stride[i]
        pads.append((padding[i], padding[i] - unread) if is_one_place else (0, 0))
        left[i] = 0 if is_one_place else padding[i]
    if list(padding) == left and not any(map(any, pads)):
        return _UNCHANGED
    flat = [amount for pair in reversed(pads) for amount in pair]
    padded = aten.constant_pad_nd.default(x, flat, 0)
    return aten.convolution.default(
        padded, weight, bias, stride, left, dilation, transposed, output_padding, groups
    )


def _of_each(values: Sequence[int], rank: int) -> Sequence[int]:
    """Give one value a dimension; PyTorch takes a single one for all."""
    return list(values) * rank if len(values) == 1 else values


DECOMPOSITIONS = {aten.convolution.default: convolution}

"""What the windows of convolutions and pools see, of tensors with channels last."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lowering.sizes import of_each

aten = torch.ops.aten
# With more places in a window, writing all of them out costs more than it gains.
MOST_PLACES = 32


class Window(NamedTuple):
    """What a convolution or a pool sees at a time: a number for each dimension but N and C."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @classmethod
    def of(cls, rank: int, *sizes: Sequence[int]) -> Window:
        """Read the arguments of an op, where one number may stand for `rank` of them."""
        return cls(*(of_each(size, rank) for size in sizes))

    @property
    def are_side_by_side(self) -> bool:
        """Whether windows touch, and see each element once: those of patch embeddings."""
        is_near = not any(self.padding) and {*self.dilation} == {1}
        return is_near and [*self.stride] == [*self.kernel]


def to_last(rank: int) -> list[int]:
    """Return the order of dimensions that puts channels, PyTorch's dimension 1, last."""
    return [0, *range(2, rank), 1]


def to_first(rank: int) -> list[int]:
    """Return the order of dimensions that puts channels back from the end."""
    return [0, rank - 1, *range(1, rank - 1)]


def windows(x: torch.Tensor, window: Window, fill: float = 0.0) -> list[torch.Tensor]:
    """Give for each place of a window what is there, wherever the window stands.

    Padding is multiplied by the weight, as in IREE's own convolutions and in some of eager's: where
    the weight is infinite, that is NaN.

    Args:
        x: `[N, ..., C]`.
        window: of as many dimensions as there are between.
        fill: what the padding is of.

    Returns:
        `[N, ..., C]` each, as many as a window has places, in order.
    """
    kernel, stride, padding, dilation = window
    amounts = [0, 0, *(amount for pad in reversed(padding) for amount in (pad, pad))]
    padded = aten.constant_pad_nd.default(x, amounts, fill) if any(padding) else x
    pieces = []
    for place in itertools.product(*map(range, kernel)):
        piece = padded
        for d, step in enumerate(stride):
            if kernel[d] == step == 1:
                continue  # of all there is
            start = dilation[d] * place[d]
            end = start + padded.shape[1 + d] - dilation[d] * (kernel[d] - 1)
            piece = aten.slice.Tensor(piece, 1 + d, start, end, step)
        pieces.append(piece)
    return pieces

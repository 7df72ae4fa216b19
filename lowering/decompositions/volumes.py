"""Convolutions of volumes, and their gradients, as those of images: of the planes that windows see.

IREE computes one of volumes number by number: that takes 20 to 100 times as long as one of images
(`ci/bench_rewrites.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowering.decompositions.spreading import spread

aten = torch.ops.aten
MOST_PLANES = 8  # of a window that sees all channels: each plane is copied as often
Window = tuple[Sequence[int], Sequence[int], Sequence[int]]


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: Window,
    convolve: Callable[[torch.Tensor, torch.Tensor, Window], torch.Tensor],
) -> torch.Tensor:
    """Convolve images, one of each plane that windows stand at; its channels are all planes seen.

    Args:
        x: `[N, C, D, H, W]`.
        weight: `[F, C, K, KH, KW]`.
        window: stride, padding and dilation, each of the last three dimensions.
        convolve: convolves `[N * D', K * C, H, W]` with `[F, K * C, KH, KW]` and such of two.

    Returns:
        `[N, F, D', H', W']`.
    """
    seen = torch.cat(_planes(x, weight.shape[2], window), 1)
    y = convolve(seen, _flat(weight), _within(window))
    return _stacked(y, x.shape[0])


def convolution_in_groups(
    x: torch.Tensor, weight: torch.Tensor, window: Window, groups: int
) -> torch.Tensor:
    """Convolve images in groups, and add up what is seen of each plane; see `convolution`."""
    (stride, padding, dilation), places = _within(window), weight.unbind(2)
    y: Any = None
    for plane, w in zip(_planes(x, len(places), window), places, strict=True):
        args = stride, padding, dilation, False, [0, 0], groups
        part = aten.convolution.default(plane, w, None, *args)
        y = part if y is None else y + part
    return _stacked(y, x.shape[0])


def convolution_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    window: Window,
    output_mask: Sequence[bool],
) -> Any:
    """Compute the gradients of `convolution` as those of the one of images.

    Args:
        gradient: `[N, F, D', H', W']`.
        x, weight, window: what was convolved, and how.
        bias_sizes, output_mask: as for `aten.convolution_backward`.
    """
    depth, count = weight.shape[2], x.shape[0]
    (stride, *_), (padding, *_), (dilation, *_) = window
    of_x, of_weight, of_bias = aten.convolution_backward.default(
        gradient.transpose(1, 2).flatten(0, 1),
        torch.cat(_planes(x, depth, window), 1),
        _flat(weight),
        bias_sizes,
        *_within(window),
        *(False, [0, 0], 1),
        output_mask,
    )
    if output_mask[0]:
        total: Any = None
        for i, plane in enumerate(of_x.unflatten(0, (count, -1)).chunk(depth, 2)):
            apart = spread(plane, 1, stride)
            begin = dilation * i - padding
            amounts = [*[0] * 6, begin, x.shape[2] - begin - apart.shape[1]]
            there = aten.constant_pad_nd.default(apart, amounts, 0)
            total = there if total is None else total + there
        of_x = _dense(total.transpose(1, 2))
    if output_mask[1]:
        of_weight = _dense(of_weight.unflatten(1, (depth, -1)).transpose(1, 2))
    return of_x, of_weight, of_bias


def _planes(x: torch.Tensor, depth: int, window: Window) -> list[torch.Tensor]:
    """Give for each place of a window, along its depth, the planes there: `[N * D', C, H, W]`."""
    (stride, *_), (padding, *_), (dilation, *_) = window
    padded = aten.constant_pad_nd.default(x, [0, 0, 0, 0, padding, padding], 0)
    planes = padded.transpose(1, 2)
    end = planes.shape[1] - dilation * (depth - 1)
    firsts = [dilation * i for i in range(depth)]
    return [aten.slice.Tensor(planes, 1, i, end + i, stride).flatten(0, 1) for i in firsts]


def _within(window: Window) -> Window:
    """Give what is of the images."""
    stride, padding, dilation = (amounts[1:] for amounts in window)
    return stride, padding, dilation


def _flat(weight: torch.Tensor) -> torch.Tensor:
    return weight.transpose(1, 2).flatten(1, 2)


def _stacked(images: torch.Tensor, count: int) -> torch.Tensor:
    apart: torch.Tensor = images.unflatten(0, (count, -1))  # type: ignore[no-untyped-call]
    return _dense(apart.transpose(1, 2))


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Lay out a tensor in its natural order, of dimensions of one element, too."""
    return x.clone(memory_format=torch.contiguous_format)

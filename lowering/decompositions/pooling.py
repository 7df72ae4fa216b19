"""Average pooling that torch-mlir or IREE do not compile, and what flows back through it.

torch-mlir refuses some windows that hang over the end (`ceil_mode`); where an end is never read and
the window stands in one place, IREE finds the sizes at odds with each other, as for convolutions.
Neither has three dimensions, or an image that is in no batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lowering.decompositions.convolution import spread_all, unread
from lowering.sizes import are_known, of_each

aten = torch.ops.aten


def avg_pool2d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Decompose `aten.avg_pool2d` where a window hangs over the end, or stands in one place.

    With `ceil_mode`, torch-mlir pads the end by a stride, whether a window hangs over or not. Where
    windows are of one place, next to each other, IREE then reads all of it: behind the end.

    Before: avg_pool2d(%x, 320, ceil_mode=True)                        with %x of [N, C, 7, 9]
    After:  %1 = sum(%x, [-2], True) / 7; sum(%1, [-1], True) / 9
    """
    rest = count_include_pad, divisor_override
    kernel, steps, pads = (of_each(v, 2) for v in (kernel_size, stride or kernel_size, padding))
    if x.dim() == 3:
        given = kernel, steps, pads, ceil_mode, *rest
        return aten.avg_pool2d.default(x.unsqueeze(0), *given).squeeze(0)
    if ceil_mode:
        pool = _Windows.of(x.shape[-2:], kernel_size, stride, padding, ceil_mode)
        if not pool.hang_over():
            return aten.avg_pool2d.default(x, kernel, steps, pads, False, *rest)
        is_ours = are_known(pool.sizes) or pool.is_along_one()
        return _averages(x, pool, *rest) if is_ours else NotImplemented
    if not are_pooled(x.shape[-2:]) or not x.dtype.is_floating_point:
        return NotImplemented
    once = []
    for i, size in enumerate(int(size) for size in x.shape[-2:]):
        is_plain = kernel[i] == size and not pads[i]
        if is_plain or places_of(size, kernel[i], steps[i], pads[i], 1, False) != 1:
            continue
        seen, padded = min(size, kernel[i] - pads[i]), min(size + 2 * pads[i], kernel[i])
        total = torch.sum(aten.slice.Tensor(x, i - 2, 0, seen), [i - 2], True)
        count = padded if count_include_pad else seen
        x = total if divisor_override else total / count
        kernel[i], steps[i], pads[i] = 1, 1, 0
        once.append(i)
    if not once:
        return NotImplemented
    if len(once) == 2:
        return x / divisor_override if divisor_override else x
    return aten.avg_pool2d.default(x, kernel, steps, pads, False, *rest)


def avg_pool3d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Decompose `aten.avg_pool3d` into sums over planes, and sums of these over the depth."""
    if not are_pooled(x.shape[-3:]) or not x.dtype.is_floating_point:
        return NotImplemented
    pool = _Windows.of(x.shape[-3:], kernel_size, stride, padding, ceil_mode)
    batch = x if x.dim() == 5 else x.unsqueeze(0)
    averages = _averages(batch, pool, count_include_pad, divisor_override)
    return averages if x.dim() == 5 else averages.squeeze(0)


def avg_pool_backward(
    rank: int,
    gradient: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    """Decompose `aten.avg_pool2d_backward` and `3d`: sums of what the windows on an element give.

    Before: avg_pool2d_backward(%g, %x, [3, 3], [2, 2], [1, 1], False, True, None)
    After:  %1 = %g / 9, spread with a zero between any two elements and padded by 1;
            avg_pool2d(%1, [3, 3], [1, 1], divisor_override=1)
    """
    if not x.dtype.is_floating_point or 0 in x.shape[-rank:]:
        return NotImplemented
    pool = _Windows.of(x.shape[-rank:], kernel_size, stride, padding, ceil_mode)
    part = gradient / pool.divisors(x.device, count_include_pad, divisor_override)
    batch = part if x.dim() == 2 + rank else part.unsqueeze(0)
    ones = [1] * rank
    places = (pool.steps, pool.pads, ones)
    rest = unread(gradient.shape[-rank:], pool.sizes, pool.kernel, *places)
    given = _sums(spread_all(batch, pool.kernel, *places, rest), pool.kernel, ones)
    return given if x.dim() == 2 + rank else given.squeeze(0)


def are_pooled(sizes: Sequence[int]) -> bool:
    """Say whether windows of these sizes can be written down: they are known, and none is 0."""
    return are_known(sizes) and 0 not in sizes


def places_of(size: int, kernel: int, step: int, pad: int, apart: int, ceil_mode: bool) -> int:
    """Count where a window stands along a dimension, as `pooling_output_shape` of PyTorch does."""
    room = size + 2 * pad - apart * (kernel - 1) - 1
    count = (room + (step - 1 if ceil_mode else 0)) // step + 1
    starts_outside = ceil_mode and (count - 1) * step >= size + pad
    return count - starts_outside


@dataclass(frozen=True)
class _Windows:
    """Where the windows of a pooling stand.

    Attributes:
        sizes: of the dimensions that are pooled, as the other lists are.
        kernel: sizes of a window.
        steps: from one to the next.
        pads: on both sides.
        counts: how many there are.
        ceil_mode: whether the last may end behind the padding.
    """

    sizes: list[int]
    kernel: list[int]
    steps: list[int]
    pads: list[int]
    counts: list[int]
    ceil_mode: bool

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
    ) -> _Windows:
        rank = len(sizes)
        kernel, steps, pads = (
            of_each(v, rank) for v in (kernel_size, stride or kernel_size, padding)
        )
        given = zip(sizes, kernel, steps, pads, strict=True)
        counts = [places_of(*each, 1, ceil_mode) for each in given]
        return cls([*sizes], kernel, steps, pads, counts, ceil_mode)

    def amounts(self) -> list[int]:
        """Return what to pad by, last dimension first, so that the windows cover all there is."""
        amounts = list[int]()
        for size, k, step, pad, count in self._each():
            amounts = [pad, (count - 1) * step + k - size - pad, *amounts]
        return amounts

    def hang_over(self) -> bool:
        """Say whether the last windows end behind the padding, or may where sizes are symbols."""
        return not all(
            statically_known_true((n - 1) * step + k <= size + 2 * pad)
            for size, k, step, pad, n in self._each()
        )

    def is_along_one(self) -> bool:
        """Say whether windows are of one place, next to each other, along a dimension."""
        return (1, 1) in zip(self.kernel, self.steps, strict=True)

    def divisors(
        self, device: torch.device, count_include_pad: bool, divisor_override: int | None
    ) -> Any:
        """Return what the sum of each window is divided by: a number, or a tensor of them."""
        if divisor_override:
            return divisor_override
        product: Any = 1
        for i, (size, k, step, pad, count) in enumerate(self._each()):
            beyond = pad if count_include_pad else 0  # what counts of the padding
            if beyond == pad and not self.ceil_mode:
                product = product * k
                continue
            first, last = -pad, (count - 1) * step - pad + k
            if first >= -beyond and statically_known_true(last <= size + beyond):
                product = product * k
                continue
            start = torch.arange(count, device=device) * step - pad
            seen = torch.clamp(start + k, max=size + beyond) - torch.clamp(start, min=-beyond)
            product = product * seen.view(count, *[1] * (len(self.sizes) - 1 - i))
        return product

    def _each(self) -> Any:
        return zip(self.sizes, self.kernel, self.steps, self.pads, self.counts, strict=True)


def _averages(
    x: torch.Tensor, pool: _Windows, count_include_pad: bool, divisor_override: int | None
) -> torch.Tensor:
    """Divide the sums over windows of the padded input, a batch."""
    padded = aten.constant_pad_nd.default(x, pool.amounts(), 0)
    divisors = pool.divisors(x.device, count_include_pad, divisor_override)
    rounding = None if x.dtype.is_floating_point else "trunc"
    sums = _sums(padded, pool.kernel, pool.steps)
    averages: torch.Tensor = torch.div(sums, divisors, rounding_mode=rounding)
    return averages


def _sums(x: torch.Tensor, kernel: Sequence[int], steps: Sequence[int]) -> torch.Tensor:
    """Sum over windows of the last 2 or 3 dimensions of a batch."""
    if len(kernel) == 3:
        planes = _sums(x.flatten(1, 2), kernel[1:], steps[1:])
        columns = planes.reshape(x.shape[0], *x.shape[1:3], -1)
        sums = _sums(columns, [kernel[0], 1], [steps[0], 1])
        return sums.reshape(*sums.shape[:-1], *planes.shape[-2:])
    result: torch.Tensor = aten.avg_pool2d.default(
        x, list(kernel), list(steps), [0, 0], False, True, 1
    )
    return result


DECOMPOSITIONS = {
    aten.avg_pool2d.default: avg_pool2d,
    aten.avg_pool2d_backward.default: functools.partial(avg_pool_backward, 2),
    aten.avg_pool3d.default: avg_pool3d,
    aten.avg_pool3d_backward.default: functools.partial(avg_pool_backward, 3),
}

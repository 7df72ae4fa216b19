"""Running sums and products of tensors of dynamic sizes, in few enough dimensions; and extremes.

IREE keeps a tile of all dimensions on the stack; of four or more it is too large.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from lowering.sizes import are_known, is_static

aten = torch.ops.aten
_MOST_DIMENSIONS = 3


def cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Decompose `aten.cumsum` of many dimensions: those before, and those after, are one each.

    Before: %1 = cumsum(%0, -2)                                with %0 of [s0, 3, 4, s1, s2]
    After:  %1 = view(cumsum(view(%0, [12*s0, s1, s2]), 1), [s0, 3, 4, s1, s2])
    """
    return _of_few(aten.cumsum.default, x, dim, dtype)


def cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Decompose `aten.cumprod` as `cumsum`."""
    return _of_few(aten.cumprod.default, x, dim, dtype)


def _of_few(op: Any, x: torch.Tensor, dim: int, dtype: torch.dtype | None) -> Any:
    if is_static(x) or x.dim() <= _MOST_DIMENSIONS:
        return NotImplemented
    dim %= x.dim()
    before, behind = math.prod(x.shape[:dim]), x.shape[dim + 1 :]
    after = [math.prod(behind)] if behind else []
    return op(x.reshape(before, x.shape[dim], *after), 1, dtype=dtype).view(x.shape)


def cummax(x: torch.Tensor, dim: int) -> Any:
    """Decompose `aten.cummax` along a known size, of which each step doubles what is looked at.

    Before: %y, %i = cummax(%x, 0)                                            with %x of [4]
    After:  %1 = where(%x[1:] >= %x[:-1], %x[1:], %x[:-1]), behind %x[:1];
            %y = where(%1[2:] >= %1[:-2], %1[2:], %1[:-2]), behind %1[:2]; %i alike

    Of equal values the last is it, and so is the last NaN. Source: `cummax_helper_cpu` in PyTorch's
    ReduceOps.cpp.
    """
    return _running_extreme(x, dim, operator.ge)


def cummin(x: torch.Tensor, dim: int) -> Any:
    """Decompose `aten.cummin` as `cummax`."""
    return _running_extreme(x, dim, operator.le)


def _running_extreme(x: torch.Tensor, dim: int, is_further: Callable[..., Any]) -> Any:
    if x.dim() == 0 or not are_known([x.shape[dim]]) or x.dtype is torch.bool:
        return NotImplemented
    dim %= x.dim()
    size = x.shape[dim]
    shape = [size if d == dim else 1 for d in range(x.dim())]
    value, place = x, torch.arange(size, device=x.device).view(shape).expand(x.shape)
    step = 1
    while step < size:
        after, before = _both(value, dim, step)
        is_after = is_further(after, before)
        if x.is_floating_point():
            is_after = (after != after) | (is_after & (before == before))  # asks for NaN
        value, place = (
            torch.cat([v.narrow(dim, 0, step), torch.where(is_after, *_both(v, dim, step))], dim)
            for v in (value, place)
        )
        step *= 2
    return value.clone(), place.clone()


def _both(x: torch.Tensor, dim: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give what lies so many steps further, and what that is further than."""
    rest = x.shape[dim] - step
    return x.narrow(dim, step, rest), x.narrow(dim, 0, rest)


DECOMPOSITIONS = {
    aten.cummax.default: cummax,
    aten.cummin.default: cummin,
    aten.cumprod.default: cumprod,
    aten.cumsum.default: cumsum,
}

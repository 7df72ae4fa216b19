"""Comparisons and extremes, as PyTorch's kernels have them: of NaN, and of two dtypes.

torch-mlir's `maximum`, `minimum` and `clamp` drop a NaN on one side, its `argmax` and `argmin` pass
NaNs over; written as comparisons, on which NaN is false, they do what PyTorch does.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias

import torch

from lowering.decompositions.narrow import lowest_bits
from lowering.decompositions.promotion import are_floats, common_dtype, promoted

aten = torch.ops.aten
_OF_FEW_BITS = (torch.int16, torch.int32)  # bytes are compared in 32 bits, see `narrow`
Number: TypeAlias = int | float


def maximum(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Decompose `aten.maximum` in floats: `a` where it is larger or NaN, else `b`."""
    if not are_floats(a, b):
        return NotImplemented
    a, b = promoted(a, b)
    return torch.where((a > b) | (a != a), a, b)  # asks for NaN


def minimum(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Decompose `aten.minimum` in floats: `a` where it is smaller or NaN, else `b`."""
    if not are_floats(a, b):
        return NotImplemented
    a, b = promoted(a, b)
    return torch.where((a < b) | (a != a), a, b)  # asks for NaN


def clamp(x: torch.Tensor, low: Number | None = None, high: Number | None = None) -> Any:
    """Decompose `aten.clamp` on floats: a NaN is neither below `low` nor above `high`."""
    x = x.to(common_dtype(x, low, high))
    if not x.dtype.is_floating_point:
        return NotImplemented
    if low != low or high != high:  # asks for NaN
        return torch.full_like(x, math.nan)
    if low is not None:
        x = torch.where(x < low, _like(x, low), x)
    if high is not None:
        x = torch.where(x > high, _like(x, high), x)
    return x


def clamp_tensor(
    x: torch.Tensor, low: torch.Tensor | None = None, high: torch.Tensor | None = None
) -> Any:
    """Decompose `aten.clamp` by tensors of floats: where a bound is NaN, so is the result."""
    x = x.to(common_dtype(x, low, high))
    if not torch.is_floating_point(x):
        return NotImplemented
    if low is not None:
        x = torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


def hardtanh(x: torch.Tensor, low: Number = -1, high: Number = 1) -> Any:
    """Decompose `aten.hardtanh` (and so `relu6`) into `clamp`, which keeps integers."""
    if x.dtype.is_floating_point:
        return torch.clamp(x, low, high)
    return torch.clamp(x, int(low), int(high))


def compare(by_tensor: Any, x: torch.Tensor, number: Any) -> Any:
    """Decompose a comparison with a number: eager rounds it to the dtype that it compares in.

    torch-mlir compares in double precision, where no float32 is 0.1, and integers in 64 bits, where
    eager has the lowest of the number.

    Before: %1 = aten.gt.Scalar(%0, 0.1)                                      with %0 of f32
    After:  %1 = aten.gt.Tensor(%0, scalar_tensor(0.1, dtype=f32))
    """
    dtype = torch.result_type(x, number)
    if not isinstance(number, (bool, int, float)):
        return NotImplemented
    if dtype in _OF_FEW_BITS:
        lowest = lowest_bits(number, dtype)
        return NotImplemented if lowest == number else by_tensor(x, lowest)
    is_rounded = dtype.is_floating_point and dtype is not torch.float64
    return by_tensor(*promoted(x, number)) if is_rounded else NotImplemented


def compare_tensors(op: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Decompose a comparison of two dtypes into one of the dtype that eager compares in."""
    return NotImplemented if x.dtype is y.dtype else op(*promoted(x, y))


def argmax(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Decompose `aten.argmax` on floats: where the largest value, or else a NaN, is first."""
    return _first(torch.amax, x, dim, keepdim)


def argmin(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Decompose `aten.argmin` on floats: where the smallest value, or else a NaN, is first."""
    return _first(torch.amin, x, dim, keepdim)


def max_dim(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """Decompose `aten.max.dim` on floats into its values and `argmax`."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    return torch.amax(x, dim, keepdim), torch.argmax(x, dim, keepdim)


def min_dim(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """Decompose `aten.min.dim` on floats into its values and `argmin`."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    return torch.amin(x, dim, keepdim), torch.argmin(x, dim, keepdim)


_COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")

DECOMPOSITIONS = {
    **{
        getattr(aten, name).Scalar: functools.partial(compare, getattr(torch, name))
        for name in _COMPARISONS
    },
    **{
        getattr(aten, name).Tensor: functools.partial(compare_tensors, getattr(torch, name))
        for name in _COMPARISONS
    },
    aten.argmax.default: argmax,
    aten.argmin.default: argmin,
    aten.clamp.Tensor: clamp_tensor,
    aten.clamp.default: clamp,
    aten.hardtanh.default: hardtanh,
    aten.max.dim: max_dim,
    aten.maximum.default: maximum,
    aten.min.dim: min_dim,
    aten.minimum.default: minimum,
}


def _first(extreme: Any, x: torch.Tensor, dim: int | None, keepdim: bool) -> Any:
    if not x.dtype.is_floating_point or x.dim() == 0:
        return NotImplemented
    value = extreme(x, [] if dim is None else [dim], True)  # NaN if there is a NaN
    is_it = (x == value) | (x != x)  # asks for NaN
    return aten.argmax.default(is_it.to(torch.int32), dim, keepdim)


def _like(x: torch.Tensor, value: Number) -> torch.Tensor:
    return torch.full((), value, dtype=x.dtype, device=x.device)

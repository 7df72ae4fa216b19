"""Powers of floats as the C standard has them, where those of torch-mlir and IREE differ.

Those give NaN for a number to the power of zero, zero for all powers of a negative number that is
written in the program, and NaN for infinite bases.
Source: C17, F.10.4.4, which PyTorch's kernels follow.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch

from lowering.decompositions.promotion import are_floats, promoted

aten = torch.ops.aten
Number: TypeAlias = int | float
_INTEGERS = (torch.int32, torch.int64)  # the device multiplies no smaller ones
_ROOTS = (0.5, -0.5)  # PyTorch takes square roots, which are NaN of -inf


def power(base: torch.Tensor, exponent: torch.Tensor) -> Any:
    """Decompose `aten.pow` of two tensors, one of them of floats, into `exp` of a product.

    Before: pow(%x, %y)
    After:  %1 = exp(%y * log(abs(%x))); the sign, NaN and 1 by `where`

    The rounding of the product costs up to 8e-6 of a large result in f32, as in IREE's own form.
    """
    if not are_floats(base, exponent):
        return NotImplemented
    x, y = promoted(base, exponent)
    size = torch.abs(x)
    half = y * 0.5
    is_whole = torch.floor(y) == y
    is_odd = is_whole & (torch.floor(half) != half)
    is_negative = (x < 0) | ((x == 0) & (torch.reciprocal(x) < 0))
    result = torch.exp(y * torch.log(size))
    result = torch.where(is_negative & is_odd, -result, result)
    result = torch.where((x < 0) & (size != math.inf) & ~is_whole, math.nan, result)
    is_one = (y == 0) | (x == 1) | ((x == -1) & (torch.abs(y) == math.inf))
    return torch.where(is_one, 1.0, result).to(x.dtype)


def power_of_number(base: Number, exponent: torch.Tensor) -> Any:
    """Decompose `aten.pow` of a number, unless it is positive and not 1: that is right."""
    dtype = torch.result_type(base, exponent)
    if not dtype.is_floating_point:
        return NotImplemented
    if not (0 < base < math.inf and base != 1):
        return power(torch.full((), base, dtype=dtype, device=exponent.device), exponent)
    if exponent.dtype is dtype:
        return NotImplemented
    return torch.pow(base, exponent.to(dtype))


def power_to_number(base: torch.Tensor, exponent: Number) -> Any:
    """Decompose `aten.pow` to a number: negative whole ones are reciprocals, others as `power`.

    That of integers, which torch-mlir cannot raise, is a product.
    """
    dtype = torch.result_type(base, exponent)
    if dtype in _INTEGERS and int(exponent) >= 0:
        return _product(base.to(dtype), int(exponent))
    if not base.dtype.is_floating_point or exponent in _ROOTS:
        return NotImplemented
    if not math.isfinite(exponent):
        return power(base, torch.full((), exponent, dtype=base.dtype, device=base.device))
    if exponent != int(exponent):
        result = torch.exp(exponent * torch.log(torch.abs(base)))
        return torch.where((base < 0) & (base != -math.inf), math.nan, result)
    return torch.reciprocal(torch.pow(base, -exponent)) if exponent < 0 else NotImplemented


def _product(base: torch.Tensor, count: int) -> torch.Tensor:
    """Multiply as often as the count has bits: overflows wrap, as PyTorch's do."""
    if count < 2:
        return base.clone() if count else torch.ones_like(base)
    half = _product(base, count // 2)
    return half * half * base if count % 2 else half * half


def ldexp(x: torch.Tensor, exponent: torch.Tensor) -> Any:
    """Decompose `aten.ldexp`: a product with a power, which torch-mlir computes in halves.

    A float by a whole number is exact, and as large as its own dtype can say, though the power
    alone may be too large for that: it is multiplied by a third of it three times.
    """
    if not x.is_floating_point() or exponent.is_floating_point() or exponent.is_complex():
        return x * torch.pow(2.0, exponent)
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    bits = math.frexp(torch.finfo(wide).max)[1].bit_length() - 1
    most = 3 * (2**bits - 2)  # beyond it all is 0 or infinite
    whole = torch.clamp(exponent.to(torch.int64), -most, most)
    third = torch.div(whole, 3, rounding_mode="floor")
    power, rest = (_power_of_two(n, bits, wide) for n in (third, whole - 2 * third))
    return (x.to(wide) * power * power * rest).to(x.dtype)


def _power_of_two(whole: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Multiply two, to the power of whole numbers of so many bits, from its squares."""
    size, power = whole.abs(), torch.ones_like(whole, dtype=dtype)
    for bit in range(bits):
        power = torch.where((size >> bit) % 2 == 1, power * 2.0 ** (2**bit), power)
    return torch.where(whole < 0, 1 / power, power)


DECOMPOSITIONS = {
    aten.ldexp.Tensor: ldexp,
    aten.pow.Scalar: power_of_number,
    aten.pow.Tensor_Scalar: power_to_number,
    aten.pow.Tensor_Tensor: power,
}

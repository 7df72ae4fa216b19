"""Division with whole quotients, and what it leaves, as PyTorch's kernels have them.

Of integers, torch-mlir truncates. Of floats, it computes quotients that are rounded up to a whole
number, and remainders that lose all digits where the quotient is large; its `aten.remainder` of two
tensors of floats is exact, so that the others are made of it.

The least integer divided by -1 has no place in its dtype: on x86, that ends the process.
Source: `div_floor` and `fmod` in PyTorch's BinaryOpsKernel.cpp, after CPython's `float_floor_div`.
"""

from __future__ import annotations

from typing import Any

import torch

from lowering.decompositions.doubles import with_sign
from lowering.decompositions.promotion import Operand, are_floats, promoted
from lowering.decompositions.recursion import Ours

aten = torch.ops.aten
_OURS = Ours()
_UNSIGNED = torch.uint8  # torch-mlir takes it for signed


def div_mode(x: Operand, y: Operand, *, rounding_mode: str | None = None) -> Any:
    """Decompose floor divisions: truncate integers and correct for the signs; floats, see below."""
    if rounding_mode and not are_floats(x, y) and not isinstance(y, torch.Tensor) and y == 0:
        x, y = promoted(x, y)  # which is checked, and so is eager's error
    if rounding_mode == "trunc" and _may_overflow(x, y):
        x, y = promoted(x, y)
        with _OURS:
            quotient = torch.div(x, _without_minus_one(y), rounding_mode="trunc")
        return torch.where(y == -1, -x, quotient)
    if rounding_mode == "trunc" and not isinstance(y, torch.Tensor) and are_floats(x, y):
        return torch.div(*promoted(x, y), rounding_mode="trunc")  # torch-mlir rounds it to f32
    if rounding_mode != "floor":
        return NotImplemented
    x, y = promoted(x, y)
    if are_floats(x, y):
        return _floor_of_floats(x, y)
    quotient = torch.div(x, y, rounding_mode="trunc")
    rest = x - quotient * y
    return quotient - ((rest != 0) & ((rest < 0) != (y < 0))).to(quotient.dtype)


def true_divide(x: Operand, y: Operand) -> Any:
    """Decompose divisions with unsigned integers, such as an image's by 255: they are of floats."""
    if not any(isinstance(v, torch.Tensor) and v.dtype is _UNSIGNED for v in (x, y)):
        return NotImplemented
    dtype = torch.result_type(x, y)
    if not dtype.is_floating_point and not dtype.is_complex:
        dtype = torch.get_default_dtype()
    return torch.div(*(v.to(dtype) if isinstance(v, torch.Tensor) else v for v in (x, y)))


def floor_divide(x: Operand, y: Operand) -> Any:
    """Decompose `aten.floor_divide`, which is `aten.div` with a rounding mode."""
    return torch.div(x, y, rounding_mode="floor")


def remainder(x: Operand, y: Operand) -> Any:
    """Decompose `aten.remainder` of a number or by one, and of integers, where it may overflow."""
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        return torch.remainder(*promoted(x, y))
    if _may_overflow(x, y):
        with _OURS:
            return torch.remainder(x, _without_minus_one(y))
    return NotImplemented


def fmod(x: torch.Tensor, y: Operand) -> Any:
    """Decompose `aten.fmod` of floats: the remainder of the sizes, with the sign of the first.

    Of integers, what a number leaves is what a tensor of it leaves.
    """
    if _may_overflow(x, y):
        with _OURS:
            return torch.fmod(x, _without_minus_one(y))
    if not are_floats(x, y):
        return NotImplemented if isinstance(y, torch.Tensor) else torch.fmod(*promoted(x, y))
    x, y = promoted(x, y)
    rest = torch.remainder(torch.abs(x), torch.abs(y))
    rest = torch.where(x == 0, x - rest, rest)  # which is zero, with the sign of `x`, or NaN
    return torch.where(x < 0, -rest, rest)


def _floor_of_floats(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Divide what is left without the rest: it is the multiple of `y`, but for one rounding."""
    rest = torch.fmod(x, y)
    quotient = (x - rest) / y
    quotient = torch.where((rest != 0) & ((rest < 0) != (y < 0)), quotient - 1, quotient)
    whole = torch.floor(quotient)
    whole = torch.where(quotient - whole > 0.5, whole + 1, whole)
    ratio = x / y
    whole = torch.where(quotient == 0, with_sign(torch.zeros_like(ratio), ratio), whole)
    return torch.where(y == 0, ratio, whole)


def _may_overflow(x: Operand, y: Operand) -> bool:
    """Say whether integers are divided by others of which nothing is known."""
    if _OURS.is_done or not isinstance(y, torch.Tensor):
        return False
    dtype = torch.result_type(x, y)
    return not dtype.is_floating_point and dtype.is_signed


def _without_minus_one(y: Any) -> torch.Tensor:
    """Give divisors that leave the same rests, and none of which is -1."""
    return torch.where(y == -1, 1, y)


DECOMPOSITIONS = {
    aten.div.Scalar: true_divide,
    aten.div.Scalar_mode: div_mode,
    aten.div.Tensor: true_divide,
    aten.div.Tensor_mode: div_mode,
    aten.floor_divide.default: floor_divide,
    aten.fmod.Scalar: fmod,
    aten.fmod.Tensor: fmod,
    aten.remainder.Scalar: remainder,
    aten.remainder.Scalar_Tensor: remainder,
    aten.remainder.Tensor: remainder,
}

"""Elementary functions that lose digits as torch-mlir and IREE compute them.

What is made of `exp(x) - 1` loses those of small numbers, and what squares its argument overflows.
IREE's arc tangent in f32 is off by up to 4e-6 of the result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch._refs

from lowering.decompositions import angles, doubles
from lowering.decompositions.promotion import promoted

aten = torch.ops.aten
_LN2 = math.log(2)
_LARGE = 1e9  # squares of larger ones leave no digit to one
# The inverse of the error function, over its argument, by 2.5 less than -log(1 - x*x), and by 3
# less than the root of that.
_ERFINV = (
    *(1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087),
    *(-4.39150654e-06, -3.5233877e-06, 3.43273939e-07, 2.81022636e-08),
)
_ERFINV_TAIL = (
    *(2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773),
    *(-0.00367342844, 0.00134934322, 0.000100950558, -0.000200214257),
)


def log1p(x: torch.Tensor) -> Any:
    """Decompose `aten.log1p` in f64, where IREE's is the logarithm of `1 + x`: corrects that.

    Source: HP-15C Advanced Functions Handbook, 1982, appendix, by W. Kahan.
    """
    if x.dtype is not torch.float64:
        return NotImplemented
    more = 1 + x
    corrected = torch.log(more) * (x / (more - 1))
    return torch.where(more == 1, x, torch.where(more == math.inf, more, corrected))


def expm1(x: torch.Tensor) -> Any:
    """Decompose `aten.expm1` in f64, where IREE's is `exp(x) - 1`: corrects that, as `log1p`."""
    if x.dtype is not torch.float64:
        return NotImplemented
    more = torch.exp(x)
    corrected = (more - 1) * (x / torch.log(more))
    is_all = (more == math.inf) | (more - 1 == -1)
    return torch.where(more == 1, x, torch.where(is_all, more - 1, corrected))


def _if_f64(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    """Make the decomposition of a function that the CPU back end has, but not in f64."""

    @functools.wraps(function)
    def decomposed(x: torch.Tensor) -> Any:
        return function(x) if x.dtype is torch.float64 else NotImplemented

    return decomposed


def _of_reals(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    """Make whole numbers floats for a function, and leave complex ones to PyTorch."""

    @functools.wraps(function)
    def decomposed(x: torch.Tensor) -> Any:
        if x.dtype.is_complex:
            return NotImplemented
        return function(x if x.dtype.is_floating_point else x.to(torch.get_default_dtype()))

    return decomposed


@_of_reals
def sinh(x: torch.Tensor) -> torch.Tensor:
    """Decompose `aten.sinh`: of small numbers by `expm1`, of large ones without overflow."""
    size = torch.abs(x)
    less_one = torch.expm1(torch.clamp(size, max=1.0))
    small = 0.5 * (less_one + less_one / (less_one + 1))
    root = torch.exp(0.5 * size)
    large = 0.5 * root * root - 0.5 / root / root
    return doubles.with_sign(torch.where(size < 1, small, large), x)


@_of_reals
def asinh(x: torch.Tensor) -> torch.Tensor:
    """Decompose `aten.asinh` into `log1p`, whose argument is small where the number is."""
    size = torch.abs(x)
    square = size * size
    small = torch.log1p(size + square / (1 + torch.sqrt(1 + square)))
    return doubles.with_sign(torch.where(size < _LARGE, small, torch.log(size) + _LN2), x)


@_of_reals
def acosh(x: torch.Tensor) -> torch.Tensor:
    """Decompose `aten.acosh` such that large numbers are not squared."""
    over = x - 1
    small = torch.log1p(over + torch.sqrt(over * (over + 2)))
    return torch.where(x < _LARGE, torch.where(x < 1, math.nan, small), torch.log(x) + _LN2)


@_of_reals
def atanh(x: torch.Tensor) -> torch.Tensor:
    """Decompose `aten.atanh` into `log1p`, whose argument is small where the number is."""
    size = torch.abs(x)
    return doubles.with_sign(0.5 * torch.log1p(2 * size / (1 - size)), x)


def erfinv(x: torch.Tensor) -> Any:
    """Decompose `aten.erfinv` into two polynomials; those that f64 would need are left to the host.

    Source: M. Giles, "Approximating the erfinv function", GPU Computing Gems, 2012, table 5.
    """
    if x.dtype is torch.float64 or x.dtype.is_complex:
        return NotImplemented
    number = x.to(torch.float32)
    depth = -torch.log((1 - number) * (1 + number))
    is_near = depth < 5
    near = doubles.polynomial(_ERFINV, torch.where(is_near, depth, 0) - 2.5)
    tail = doubles.polynomial(_ERFINV_TAIL, torch.sqrt(torch.where(is_near, 9, depth)) - 3)
    size = torch.abs(number)
    at_end = torch.where(size == 1, number * math.inf, math.nan)
    inverse = torch.where(size < 1, torch.where(is_near, near, tail) * number, at_end)
    return inverse.to(x.dtype if x.dtype.is_floating_point else torch.get_default_dtype())


def elu(x: torch.Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    """Decompose `aten.elu` (and so `selu` and `celu`) into `expm1`."""
    below = torch.expm1(x * input_scale) * (alpha * scale)
    return torch.where(x > 0, x * scale, below)


def rrelu(
    x: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Any:
    """Decompose `aten.rrelu_with_noise_functional` where nothing is drawn: slopes are the mean."""
    if training:
        return NotImplemented
    return aten.leaky_relu.default(x, (lower + upper) / 2), noise.clone()


def rrelu_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    noise: torch.Tensor,
    lower: float,
    upper: float,
    training: bool,
    is_result: bool,
) -> Any:
    """Decompose `aten.rrelu_with_noise_backward`, as `rrelu`."""
    if training:
        return NotImplemented
    return aten.leaky_relu_backward.default(gradient, x, (lower + upper) / 2, is_result)


def logaddexp(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Decompose `aten.logaddexp`: of a NaN it is NaN, beside an infinity too."""
    if a.dtype.is_complex or b.dtype.is_complex:
        return NotImplemented
    return _largest_and(a, b, lambda less: torch.log1p(torch.exp(less)))


def logaddexp2(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Decompose `aten.logaddexp2`, as `logaddexp`."""
    return _largest_and(a, b, lambda less: torch.log1p(torch.exp2(less)) * (1 / _LN2))


def atan2(y: torch.Tensor, x: torch.Tensor) -> Any:
    """Decompose `aten.atan2` into `atan`: IREE's own is NaN for two zeros and two infinities."""
    common = torch.result_type(y, x)
    dtype = common if common.is_floating_point else torch.get_default_dtype()
    y, x = y.to(dtype), x.to(dtype)
    is_zero, is_infinite = (x == 0) & (y == 0), torch.abs(x) + torch.abs(y) == math.inf
    slope = torch.where(is_zero, y, y / torch.where(is_zero, 1, x))
    diagonal = torch.where((x < 0) == (y < 0), torch.ones_like(slope), -1)
    are_both = is_infinite & (torch.abs(x) == torch.abs(y))
    angle = torch.atan(torch.where(are_both, diagonal, slope))
    behind = torch.where(_is_negative(y), angle - math.pi, angle + math.pi)
    return torch.where(_is_negative(x), behind, angle)


def fmax(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Decompose `aten.fmax`: a NaN is smaller than anything."""
    return torch.where((a >= b) | (b != b), a, b)  # asks for NaN


def fmin(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Decompose `aten.fmin`: a NaN is larger than anything."""
    return torch.where((a <= b) | (b != b), a, b)  # asks for NaN


def hypot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Decompose `aten.hypot` such that nothing large or small is squared."""
    a, b = (torch.abs(side) for side in promoted(a, b))
    large, small = torch.maximum(a, b), torch.minimum(a, b)
    ratio = torch.where(large == 0, 0, small / large)
    is_infinite = (a == math.inf) | (b == math.inf)
    return torch.where(is_infinite, math.inf, large * torch.sqrt(1 + ratio * ratio))


def addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, value: Any = 1) -> Any:
    """Decompose `aten.addcmul` as PyTorch does; to add to integers, eager makes the value one.

    PyTorch's own decomposition takes no float there.
    """
    are_whole = not any(t.is_floating_point() or t.is_complex() for t in (x, a, b))
    if are_whole and isinstance(value, float):
        value = int(value)
    return torch._refs.addcmul(x, a, b, value=value)


@_of_reals
def log10(x: torch.Tensor) -> torch.Tensor:
    """Decompose `aten.log10`, which the CPU back end does not have."""
    return doubles.log10(x) if x.dtype is torch.float64 else torch.log(x) * (1 / math.log(10))


def angle(x: torch.Tensor) -> Any:
    """Decompose `aten.angle` of reals."""
    if x.dtype.is_complex:
        return NotImplemented
    number = x if x.dtype.is_floating_point else x.to(torch.get_default_dtype())
    turned = torch.where(number < 0, math.pi, torch.zeros_like(number))
    return torch.where(number != number, number, turned)  # asks for NaN


def polar(size: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Decompose `aten.polar`."""
    return torch.complex(size * torch.cos(angle), size * torch.sin(angle))


def _is_negative(x: torch.Tensor) -> torch.Tensor:
    """Say whether a number, which is not NaN, has the sign, -0.0 too."""
    return (x < 0) | ((x == 0) & (1 / x < 0))


def _largest_and(
    a: torch.Tensor, b: torch.Tensor, rest: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Add to the largest what the other leaves, by how much it is less."""
    a, b = promoted(a, b)
    largest = torch.maximum(a, b)
    added = largest + rest(-torch.abs(a - b))
    return torch.where(torch.abs(largest) == math.inf, largest, added)


def lerp(start: torch.Tensor, end: torch.Tensor, weight: Any) -> Any:
    """Decompose `aten.lerp`: from the nearer end, as eager does.

    PyTorch's own decomposition lays its result out anew, by an op that nobody lowers.
    """
    apart = end - start
    if isinstance(weight, torch.Tensor):
        near = weight.abs() < 0.5
        return torch.where(near, start + weight * apart, end - (1 - weight) * apart)
    return start + weight * apart if abs(weight) < 0.5 else end - (1 - weight) * apart


def trunc(x: torch.Tensor) -> Any:
    """Decompose `aten.trunc` of floats, of which torch-mlir's loses the sign of a zero."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    return torch.where(x < 0, torch.ceil(x), torch.floor(x))


DECOMPOSITIONS = {
    aten.acos.default: _if_f64(doubles.acos),
    aten.acosh.default: acosh,
    aten.addcmul.default: addcmul,
    aten.angle.default: angle,
    aten.asin.default: _if_f64(doubles.asin),
    aten.asinh.default: asinh,
    aten.atan.default: _of_reals(doubles.atan),
    aten.atan2.default: atan2,
    aten.atanh.default: atanh,
    aten.cos.default: angles.cos,
    aten.elu.default: elu,
    aten.erf.default: _if_f64(doubles.erf),
    aten.erfinv.default: erfinv,
    aten.expm1.default: expm1,
    aten.fmax.default: fmax,
    aten.fmin.default: fmin,
    aten.hypot.default: hypot,
    aten.lerp.Scalar: lerp,
    aten.lerp.Tensor: lerp,
    aten.log10.default: log10,
    aten.log1p.default: log1p,
    aten.log2.default: _if_f64(doubles.log2),
    aten.logaddexp.default: logaddexp,
    aten.logaddexp2.default: logaddexp2,
    aten.polar.default: polar,
    aten.rrelu_with_noise_backward.default: rrelu_backward,
    aten.rrelu_with_noise_functional.default: rrelu,
    aten.sin.default: angles.sin,
    aten.sinh.default: sinh,
    aten.tan.default: angles.tan,
    aten.tanh.default: _if_f64(doubles.tanh),
    aten.trunc.default: trunc,
}

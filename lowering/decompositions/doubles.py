"""Elementary functions in f64, of which IREE's CPU back end has none: from series and products.

Each brings its argument to where a series of few terms has all digits. Coefficients are computed,
not fitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

_ATAN = [Fraction((-1) ** i, 2 * i + 1) for i in range(13)]
# exp(x*x) * erf(x) is 2 / sqrt(pi) * x times a series in x*x without a minus.
# Source: M. Abramowitz, I. Stegun, Handbook of Mathematical Functions, 1964, 7.1.6.
_ERF = [Fraction(2**i, math.prod(range(1, 2 * i + 2, 2))) for i in range(60)]
_ERF_SMALL = 3.0  # up to which the series is taken
_LARGEST_POWER = 308  # of ten
_ERFC_LEVELS = 24  # of the continued fraction beyond


def atan(x: torch.Tensor) -> torch.Tensor:
    """Compute the arc tangent, of f32, too: that of a half or a quarter of the angle."""
    halvings, terms = (2, _ATAN) if x.dtype is torch.float64 else (1, _ATAN[:10])
    size = torch.abs(x)
    is_steep = size > 1
    part = torch.where(is_steep, 1 / size, size)
    for _ in range(halvings):
        part = part / (1 + torch.sqrt(1 + part * part))
    angle = 2**halvings * part * polynomial(terms, part * part)
    return with_sign(torch.where(is_steep, math.pi / 2 - angle, angle), x)


def asin(x: torch.Tensor) -> torch.Tensor:
    """Compute the arc sine."""
    return atan(x / torch.sqrt((1 - x) * (1 + x)))


def acos(x: torch.Tensor) -> torch.Tensor:
    """Compute the arc cosine, of which small angles keep their digits."""
    return 2 * atan(torch.sqrt((1 - x) / (1 + x)))


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Compute the hyperbolic tangent from `expm1`, whose argument is small where the number is."""
    more = torch.expm1(2 * torch.clamp(torch.abs(x), max=20.0))  # 1.0 from there on
    return with_sign(more / (more + 2), x)


def log2(x: torch.Tensor) -> torch.Tensor:
    """Compute the logarithm to the base 2, exact for powers of 2."""
    log = torch.log(x) * (1 / math.log(2))
    whole = torch.round(log)
    return torch.where(torch.exp2(whole) == x, whole, log)


def log10(x: torch.Tensor) -> torch.Tensor:
    """Compute the logarithm to the base 10: of the power next to a number, and of what is left."""
    log = torch.log(x) * (1 / math.log(10))
    whole = torch.where(torch.abs(log) < _LARGEST_POWER, torch.round(log), 0)
    size, power = torch.abs(whole).to(torch.int64), torch.ones_like(x)
    for bit in range(_LARGEST_POWER.bit_length()):
        power = torch.where((size >> bit) % 2 == 1, power * 10.0 ** (2**bit), power)
    rest = torch.where(whole < 0, x * power, x / power)
    return whole + torch.log(rest) * (1 / math.log(10))


def erf(x: torch.Tensor) -> torch.Tensor:
    """Compute the error function: by its series, and by a continued fraction where it is near 1.

    Source: M. Abramowitz, I. Stegun, Handbook of Mathematical Functions, 1964, 7.1.14.
    """
    size = torch.clamp(torch.abs(x), max=6.0)  # 1.0 from there on
    square = size * size
    bell = torch.exp(-square)
    small = torch.clamp(size, max=_ERF_SMALL)
    near = 2 / math.sqrt(math.pi) * small * polynomial(_ERF, small * small) * bell
    large = torch.clamp(size, min=_ERF_SMALL)
    rest = large
    for level in range(_ERFC_LEVELS, 0, -1):
        rest = large + 0.5 * level / rest
    far = 1 - bell / rest * (1 / math.sqrt(math.pi))
    return with_sign(torch.where(size < _ERF_SMALL, near, far), x)


def polynomial(coefficients: Sequence[Fraction | float], x: torch.Tensor) -> torch.Tensor:
    """Evaluate a polynomial whose first coefficient is the constant one, by Horner's rule."""
    result = torch.full_like(x, float(coefficients[-1]))
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + float(coefficient)
    return result


def with_sign(size: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Give a size the sign of a number; where that is zero, it is the result."""
    return torch.where(x < 0, -size, torch.where(x == 0, x, size))

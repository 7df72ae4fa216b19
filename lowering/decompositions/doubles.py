"""Elementary functions in f64, of which IREE's CPU back end has none: from series and products.

Each brings its argument to where a series of few terms has all digits. Coefficients are computed,
not fitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

_PART_BITS = 26  # of parts: the product of two is exact
_SIN = [Fraction((-1) ** i, math.factorial(2 * i + 1)) for i in range(11)]
_COS = [Fraction((-1) ** i, math.factorial(2 * i)) for i in range(12)]
_ATAN = [Fraction((-1) ** i, 2 * i + 1) for i in range(13)]
# exp(x*x) * erf(x) is 2 / sqrt(pi) * x times a series in x*x without a minus.
# Source: M. Abramowitz, I. Stegun, Handbook of Mathematical Functions, 1964, 7.1.6.
_ERF = [Fraction(2**i, math.prod(range(1, 2 * i + 2, 2))) for i in range(60)]
_ERF_SMALL = 3.0  # up to which the series is taken
_ERFC_LEVELS = 24  # of the continued fraction beyond


def sin(x: torch.Tensor) -> torch.Tensor:
    """Compute the sine, right while whole numbers are floats: below 2**52."""
    return _in_quadrant(x, 0)


def cos(x: torch.Tensor) -> torch.Tensor:
    """Compute the cosine, as `sin`."""
    return _in_quadrant(x, 1)


def tan(x: torch.Tensor) -> torch.Tensor:
    """Compute the tangent, as `sin`."""
    return sin(x) / cos(x)


def atan(x: torch.Tensor) -> torch.Tensor:
    """Compute the arc tangent: that of a quarter of the angle, four times."""
    size = torch.abs(x)
    is_steep = size > 1
    part = torch.where(is_steep, 1 / size, size)
    for _ in range(2):
        part = part / (1 + torch.sqrt(1 + part * part))
    angle = 4 * part * _polynomial(_ATAN, part * part)
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


def erf(x: torch.Tensor) -> torch.Tensor:
    """Compute the error function: by its series, and by a continued fraction where it is near 1.

    Source: M. Abramowitz, I. Stegun, Handbook of Mathematical Functions, 1964, 7.1.14.
    """
    size = torch.clamp(torch.abs(x), max=6.0)  # 1.0 from there on
    square = size * size
    bell = torch.exp(-square)
    small = torch.clamp(size, max=_ERF_SMALL)
    near = 2 / math.sqrt(math.pi) * small * _polynomial(_ERF, small * small) * bell
    large = torch.clamp(size, min=_ERF_SMALL)
    rest = large
    for level in range(_ERFC_LEVELS, 0, -1):
        rest = large + 0.5 * level / rest
    far = 1 - bell / rest * (1 / math.sqrt(math.pi))
    return with_sign(torch.where(size < _ERF_SMALL, near, far), x)


def _in_quadrant(x: torch.Tensor, turned_by: int) -> torch.Tensor:
    """Compute the sine of an angle that is turned by so many quarters."""
    quarters = torch.round(x * (2 / math.pi))
    angle = torch.where(quarters == 0, x, _without(x, quarters))
    quadrant = quarters + turned_by
    quadrant = quadrant - 4 * torch.floor(quadrant * 0.25)
    square = angle * angle
    is_odd = (quadrant == 1) | (quadrant == 3)
    size = torch.where(is_odd, _polynomial(_COS, square), angle * _polynomial(_SIN, square))
    return torch.where(quadrant < 2, size, -size)


def _without(angle: torch.Tensor, quarters: torch.Tensor) -> torch.Tensor:
    """Take quarters of a turn from an angle, in parts whose products are exact.

    Source: W. J. Cody and W. Waite, Software Manual for the Elementary Functions, 1980, chapter 8.
    """
    many = torch.round(quarters * 2.0**-_PART_BITS) * 2.0**_PART_BITS
    few = quarters - many
    for part in _QUARTER:
        angle = angle - many * part - few * part
    return angle


def _quarter_turn() -> Sequence[float]:
    """Return pi / 2 in six parts, of which only the last is rounded."""
    rest, parts = _pi() / 2, []
    for i in range(1, 7):
        scale = 2 ** (_PART_BITS * i)
        parts.append(float(Fraction(math.floor(rest * scale), scale)))
        rest -= Fraction(parts[-1])
    return parts


def _pi() -> Fraction:
    """Return pi with 200 bits. Source: J. Machin, 1706: 16 atan(1/5) - 4 atan(1/239)."""

    def atan_of_one_over(n: int) -> Fraction:
        terms = (Fraction((-1) ** i, (2 * i + 1) * n ** (2 * i + 1)) for i in range(50))
        return sum(terms, Fraction(0))

    return 16 * atan_of_one_over(5) - 4 * atan_of_one_over(239)


_QUARTER = _quarter_turn()


def _polynomial(coefficients: Sequence[Fraction], x: torch.Tensor) -> torch.Tensor:
    """Evaluate a polynomial whose first coefficient is the constant one, by Horner's rule."""
    result = torch.full_like(x, float(coefficients[-1]))
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + float(coefficient)
    return result


def with_sign(size: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Give a size the sign of a number; where that is zero, it is the result."""
    return torch.where(x < 0, -size, torch.where(x == 0, x, size))

"""Sine, cosine and tangent: of what is left of an angle without quarters of a turn, by series.

IREE's own are off by up to 2e-7 wherever the angle is: `sin(1e-9)` is 1e-7, and `sin(x) / x`
anything. They lose 3e-8 more for each unit of the angle. Its CPU back end has none in f64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from lowering.decompositions.doubles import polynomial

_SIN = [Fraction((-1) ** i, math.factorial(2 * i + 1)) for i in range(11)]
_COS = [Fraction((-1) ** i, math.factorial(2 * i)) for i in range(12)]
# How many terms of each series an eighth of a turn needs.
_TERMS = {torch.float32: (5, 6), torch.float64: (len(_SIN), len(_COS))}


def sin(x: torch.Tensor) -> Any:
    """Decompose `aten.sin`: right below 1e8 in f32, where floats are 8 apart, and 2**52 in f64."""
    return _in_quadrant(x, 0)


def cos(x: torch.Tensor) -> Any:
    """Decompose `aten.cos`, as `sin`."""
    return _in_quadrant(x, 1)


def tan(x: torch.Tensor) -> Any:
    """Decompose `aten.tan`, as `sin`."""
    return NotImplemented if x.dtype.is_complex else sin(x) / cos(x)


def _in_quadrant(x: torch.Tensor, turned_by: int) -> Any:
    """Compute the sine of an angle that is turned by so many quarters."""
    if x.dtype.is_complex:
        return NotImplemented
    dtype = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
    x = x.to(torch.float64 if dtype is torch.float64 else torch.float32)
    rest, quarters = _without_quarters(x) if x.dtype is torch.float64 else _without_turns(x)
    rest = torch.clamp(rest, -1.5, 1.5)  # of what is too large, it may be anything
    angle = torch.where(torch.abs(x) < 0.5, x, rest)  # a zero with its sign
    quadrant = quarters + turned_by
    quadrant = quadrant - _nearest(quadrant, 4.0)  # -2 to 2
    sines, cosines = _TERMS[x.dtype]
    square = angle * angle
    sine = angle * polynomial(_SIN[:sines], square)
    is_odd = torch.abs(quadrant) == 1
    size = torch.where(is_odd, polynomial(_COS[:cosines], square), sine)
    return torch.where((quadrant < 0) | (quadrant == 2), -size, size).to(dtype)


def _without_quarters(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is left of an angle in f64 without quarters of a turn, and how many these are."""
    return _without(angle, 2 / math.pi, _BITS, _QUARTER)


def _without_turns(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same in f32, first without whole turns: of the quarters that are left, there are few.

    What is subtracted first is exact, and so are the differences while there are less than 2**24
    turns.
    """
    angle, turns = _without(angle, 1 / math.tau, _BITS_F32, _TURN_F32[:-1])
    rest = turns * _TURN_F32[-1]
    quarters = _nearest((angle - rest) * (2 / math.pi))
    for part in _QUARTER_F32[:-1]:
        angle = angle - quarters * part
    return angle - (quarters * _QUARTER_F32[-1] + rest), quarters


def _without(
    angle: torch.Tensor, how_many: float, bits: int, parts: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Subtract the parts of something as often as it is in an angle; return how often, too.

    Args:
        angle: the angle.
        how_many: there are in an angle of 1.
        bits: of each part, and of each half of the number: the product of two is exact.
        parts: what is subtracted.
    Source: W. J. Cody and W. Waite, Software Manual for the Elementary Functions, 1980, chapter 8.
    """
    number = angle * how_many
    many = _nearest(number, 2.0**bits)
    few = _nearest(number - many)
    for part in parts:
        angle = angle - many * part - few * part
    return angle, many + few


def _nearest(x: torch.Tensor, unit: float = 1.0) -> torch.Tensor:
    """Round to multiples of a power of 2: right below half as many of it as a float has digits for.

    IREE makes a dozen operations of `round`.
    """
    large = 1.5 * unit / torch.finfo(x.dtype).eps  # floats as large are so far apart
    return (x + large) - large


def _pi() -> Fraction:
    """Return pi with 200 bits. Source: J. Machin, 1706: 16 atan(1/5) - 4 atan(1/239)."""

    def atan_of_one_over(n: int) -> Fraction:
        terms = (Fraction((-1) ** i, (2 * i + 1) * n ** (2 * i + 1)) for i in range(50))
        return sum(terms, Fraction(0))

    return 16 * atan_of_one_over(5) - 4 * atan_of_one_over(239)


def _parts(number: Fraction, first: int, bits: int, count: int) -> Sequence[float]:
    """Return a number in parts, of which only the last is rounded.

    Args:
        number: the number.
        first: how many bits behind the point the first part has.
        bits: of each of the others.
        count: how many parts.
    """
    parts = []
    for i in range(count - 1):
        scale = 2 ** (first + bits * i)
        parts.append(float(Fraction(math.floor(number * scale), scale)))
        number -= Fraction(parts[-1])
    return [*parts, float(number)]


_PI = _pi()
_BITS, _BITS_F32 = 26, 12
_QUARTER = _parts(_PI / 2, _BITS, _BITS, 6)
_TURN_F32 = _parts(_PI * 2, _BITS_F32 - 3, _BITS_F32, 3)
_QUARTER_F32 = _parts(_PI / 2, 20, 20, 3)

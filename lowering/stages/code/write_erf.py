"""Have the error function computed as one polynomial."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from lowering.stages.ir.symbols import walk
from lowering.stages.ir.templates import replace_by

_LARGEST = 3.92  # from here on it is 1.0, in float32
_DEGREE = 15  # of what is left without the argument, in its square
_ERF = """
func.func private @erf(%x: {kind}) -> {kind} {{
  %largest = arith.constant {largest} : {kind}
  %least = arith.constant {least} : {kind}
  %is_large = arith.cmpf ogt, %x, %largest : {kind}
  %no_large = arith.select %is_large, %largest, %x : {bits}, {kind}
  %is_small = arith.cmpf olt, %no_large, %least : {kind}
  %size = arith.select %is_small, %least, %no_large : {bits}, {kind}
  %scale = arith.constant {scale} : {kind}
  %shift = arith.constant {shift} : {kind}
  %square = arith.mulf %size, %size : {kind}
  %u = math.fma %square, %scale, %shift : {kind}
  %sum{degree} = arith.constant {last} : {kind}
{terms}
  %product = arith.mulf %sum0, %size : {kind}
  %one = arith.constant {one} : {kind}
  %minus_one = arith.constant {minus_one} : {kind}
  %is_above = arith.cmpf ogt, %product, %one : {kind}
  %not_above = arith.select %is_above, %one, %product : {bits}, {kind}
  %is_below = arith.cmpf olt, %not_above, %minus_one : {kind}
  %y = arith.select %is_below, %minus_one, %not_above : {bits}, {kind}
  return %y : {kind}
}}
"""
_TERM = """
  %term{i} = arith.constant {factor} : {kind}
  %sum{i} = math.fma %sum{before}, %u, %term{i} : {kind}
"""


def write_erf(module: Any) -> None:
    """Write each error function of float32 as its argument times a polynomial of the square.

    IREE chooses between the coefficients of three quotients of polynomials, and divides. One
    polynomial takes half as many operations; its result is within 2.4e-7 of the function's (IREE's
    within 2.6e-7), no larger than 1, and a zero keeps its sign.

    Before: %y = math.erf %x
    After:  %s = %x, no larger than 3.92;  %y = %s * p(2 / 3.92**2 * %s * %s - 1)

    Args:
        module: one in flow, its dispatches formed.
    """
    for op in [op for op in walk(module) if op.name == "math.erf"]:
        kind = op.results[0].type
        if str(getattr(kind, "element_type", kind)) == "f32":
            replace_by(op, _text(str(kind)), list(op.operands))


@cache
def _text(kind: str) -> str:
    """Write the function of numbers, or of vectors of them."""

    def constant(number: float) -> str:
        return f"dense<{number:.9e}>" if kind.startswith("vector") else f"{number:.9e}"

    *factors, last = _polynomial(_without_argument, 0.0, _LARGEST**2, _DEGREE)
    terms = [
        _TERM.format(i=i, before=i + 1, factor=constant(factor), kind=kind)
        for i, factor in reversed(list(enumerate(factors)))
    ]
    return _ERF.format(
        kind=kind,
        bits=kind.replace("f32", "i1"),
        largest=constant(_LARGEST),
        least=constant(-_LARGEST),
        scale=constant(2 / _LARGEST**2),
        shift=constant(-1.0),
        one=constant(1.0),
        minus_one=constant(-1.0),
        degree=_DEGREE,
        last=constant(last),
        terms="".join(terms),
    )


def _without_argument(square: float) -> float:
    """Compute erf(x) / x of a square of x that is no zero."""
    x = math.sqrt(square)
    return math.erf(x) / x


def _polynomial(
    function: Callable[[float], float], first: float, last: float, degree: int
) -> Sequence[float]:
    """Return the coefficients, in u from -1 to 1, of a polynomial that is close to a function.

    Args:
        function: smooth; it is asked for no value at the ends.
        first, last: what u is to run from and to.
        degree: of the polynomial.

    Source: interpolation at the roots of a Chebyshev polynomial; L. N. Trefethen, Approximation
        Theory and Approximation Practice, 2013, chapters 2 to 4.
    """
    count = degree + 1
    angles = [math.pi * (2 * i + 1) / (2 * count) for i in range(count)]
    values = [function(first + (last - first) * (1 + math.cos(a)) / 2) for a in angles]
    total, before, now = [0.0] * count, [0.0] * count, [1.0] + [0.0] * degree  # T(-1), T(0)
    for k in range(count):
        weight = sum(v * math.cos(k * a) for v, a in zip(values, angles, strict=True))
        weight *= (1 if k == 0 else 2) / count
        total = [t + weight * n for t, n in zip(total, now, strict=True)]
        double = 1 if k == 0 else 2  # T(1) = u T(0), then T(k + 1) = 2 u T(k) - T(k - 1)
        shifted = itertools.chain([0.0], now[:-1])
        before, now = now, [double * s - b for s, b in zip(shifted, before, strict=True)]
    return total

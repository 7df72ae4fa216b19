"""Symbolic sizes of an artifact: found from the shapes of a call, checked, and computed with."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
_LONGEST, _LARGEST = 2000, 1 << 128
# How sympy and torch write the functions of sizes that exports have.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "CeilToInt": math.ceil,
    "FloorDiv": operator.floordiv,
    "FloorToInt": math.floor,
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "ceiling": math.ceil,
    "floor": math.floor,
}


def evaluate(expression: str, sizes: Mapping[str, int]) -> int | float:
    """Compute an expression of symbolic sizes, e.g. `2*s0 + 1`; nothing but arithmetic is done.

    Raises:
        ValueError: it is no such expression, or names an unknown size.
    """
    try:
        if len(expression) > _LONGEST:
            raise TypeError("it is too long")
        result: int | float = _bounded(ast.parse(expression, mode="eval").body, sizes)
    except (SyntaxError, RecursionError, MemoryError, ArithmeticError, TypeError) as error:
        raise ValueError(f"{expression[:80]!r} is no expression of sizes: {error}") from error
    return result


def _bounded(node: ast.AST, sizes: Mapping[str, int]) -> Any:
    value = _value(node, sizes)
    if abs(value) > _LARGEST:  # no honest shape has it, and it may take all memory
        raise ValueError("a number that is no size")
    return value


def _value(node: ast.AST, sizes: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name) if name in sizes:
            return sizes[name]
        case ast.BinOp(op=ast.Pow(), left=base, right=power):
            return _power(_bounded(base, sizes), _bounded(power, sizes))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_bounded(left, sizes), _bounded(right, sizes))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_bounded(operand, sizes))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_bounded(arg, sizes) for arg in args))
    raise ValueError(f"{ast.unparse(node)[:80]!r} is no expression of the sizes {list(sizes)}")


def _power(base: Any, power: Any) -> Any:
    if abs(power) > 8:
        raise ValueError(f"{base}**{power} is no size")
    return base**power


def match_shape(
    name: str, shape: Sequence[int], wanted: Sequence[int | str], sizes: dict[str, int]
) -> None:
    """Check a shape against one with symbols; those that are new are added to `sizes`.

    Args:
        name: of the tensor, for the error.
        shape: its sizes.
        wanted: a size, a symbol, or an expression of symbols for each.
        sizes: symbol -> size, as far as they are known.

    Raises:
        ValueError: it does not match; says which dimension.
    """
    if len(shape) != len(wanted):
        raise ValueError(f"{name} has {len(shape)} dimensions, not {len(wanted)}: {list(shape)}")
    for dim, (size, want) in enumerate(zip(shape, wanted, strict=True)):
        if isinstance(want, str) and want.isidentifier():
            expected: int | float = sizes.setdefault(want, size)
        elif isinstance(want, str):
            try:
                expected = evaluate(want, sizes)
            except ValueError:  # of a symbol that no dimension shows: the device checks it
                continue
        else:
            expected = want
        if size != expected:
            symbol = f" ({want})" if isinstance(want, str) else ""
            raise ValueError(f"dimension {dim} of {name} is {size}, not {expected}{symbol}")


def check_ranges(
    sizes: Mapping[str, int],
    ranges: Mapping[str, tuple[int, int | None]],
    places: Mapping[str, str],
) -> None:
    """Check that sizes are in the ranges that were compiled for.

    Args:
        sizes: symbol -> size.
        ranges: symbol -> least and largest size.
        places: symbol -> where a user sees it.

    Raises:
        ValueError: one is not.
    """
    for symbol, (low, high) in ranges.items():
        size = sizes.get(symbol)
        if size is not None and (size < low or (high is not None and size > high)):
            limits = f"{low} or more" if high is None else f"{low} to {high}"
            place = places.get(symbol, "a size")
            raise ValueError(f"{place} is {size}, and the artifact is for {limits} ({symbol})")


def places_of(shapes: Mapping[str, Sequence[int | str]]) -> dict[str, str]:
    """Return where each symbol is seen first, e.g. `dimension 1 of x`, from shapes by name."""
    found: dict[str, str] = {}
    for name, shape in shapes.items():
        for dim, size in enumerate(shape):
            if isinstance(size, str):
                found.setdefault(size, f"dimension {dim} of {name}")
    return found

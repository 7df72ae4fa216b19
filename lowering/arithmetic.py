"""Expressions of sizes as text that anybody may have written: nothing but arithmetic is done."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Container, Mapping
from functools import lru_cache
from typing import Any

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.BitAnd: operator.and_,  # how sympy writes what holds of several relations
    ast.BitOr: operator.or_,
    ast.Invert: operator.not_,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_LONGEST, _LARGEST = 2000, 1 << 128


def _power(base: Any, power: Any) -> Any:
    if abs(power) > 8:
        raise ValueError(f"{base}**{power} is no size")
    return base**power


def _root(square: Any) -> float:
    if square < 0:
        raise ArithmeticError(f"there is no root of {square}")
    return math.sqrt(square)


# How sympy and torch write the functions of sizes that exports have.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Abs": abs,
    "BitwiseFn_bitwise_and": operator.and_,
    "BitwiseFn_bitwise_or": operator.or_,
    "BitwiseFn_bitwise_xor": operator.xor,
    "CeilToInt": math.ceil,
    "CleanDiv": operator.floordiv,
    "Eq": operator.eq,
    "FloatPow": _power,
    "FloatTrueDiv": operator.truediv,
    "FloorDiv": operator.floordiv,
    "FloorToInt": math.floor,
    "IntTrueDiv": operator.truediv,
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "Ne": operator.ne,
    "OpaqueUnaryFn_sqrt": _root,
    "PowByNatural": _power,
    "PythonMod": operator.mod,
    "RoundToInt": round,
    "ToFloat": float,
    "TruncToInt": math.trunc,
    "ceiling": math.ceil,
    "floor": math.floor,
    "sqrt": _root,
}


def evaluate(expression: str, sizes: Mapping[str, int]) -> int | float:
    """Compute an expression of symbolic sizes, e.g. `2*s0 + 1`.

    Raises:
        ValueError: it is no such expression, or names an unknown size.
    """
    try:
        result: int | float = _bounded(_parsed(expression), sizes)
    except (SyntaxError, RecursionError, MemoryError, ArithmeticError, TypeError) as error:
        raise ValueError(f"{expression[:80]!r} is no expression of sizes: {error}") from error
    return result


@lru_cache(maxsize=1024)
def names_in(expression: str) -> frozenset[str]:
    """Return the symbols of an expression; of what is none, nothing."""
    try:
        nodes = [*ast.walk(_parsed(expression))]
    except (SyntaxError, RecursionError, MemoryError, TypeError, ValueError):
        return frozenset()
    functions = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    return frozenset(n.id for n in nodes if isinstance(n, ast.Name) and id(n) not in functions)


def can_evaluate(expression: str, names: Container[str]) -> bool:
    """Say whether an expression can be computed once the sizes of these names are known."""
    try:
        evaluate(expression, {name: 1 for name in names_in(expression) if name in names})
    except ValueError as error:
        return isinstance(error.__cause__, ArithmeticError)  # at this size alone
    return True


@lru_cache(maxsize=1024)
def is_polynomial(expression: str) -> bool:
    """Say whether an expression is made of sums and products of whole numbers alone."""
    kinds = (ast.Constant, ast.Name, ast.BinOp, ast.UnaryOp, ast.Load)
    signs = (ast.Add, ast.Sub, ast.Mult, ast.USub)
    nodes = [*ast.walk(_parsed(expression))]
    whole = all(isinstance(n.value, int) for n in nodes if isinstance(n, ast.Constant))
    return whole and all(isinstance(node, (*kinds, *signs)) for node in nodes)


@lru_cache(maxsize=1024)
def _parsed(expression: str) -> ast.expr:
    if len(expression) > _LONGEST:
        raise TypeError("it is too long")
    return ast.parse(expression, mode="eval").body


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
        case ast.Compare(ops=[op], left=left, comparators=[right]) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_bounded(left, sizes), _bounded(right, sizes))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_bounded(operand, sizes))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_bounded(arg, sizes) for arg in args))
    raise ValueError(f"{ast.unparse(node)[:80]!r} is no expression of the sizes {list(sizes)}")

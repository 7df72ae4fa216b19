"""Sizes of a traced call as Python expressions of its size symbols, made here, and trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._sympy.printers import PythonPrinter

Sizes = Mapping[str, int]
_PRINTER = PythonPrinter()
_NAMES: dict[str, Any] = {
    "min": min,
    "max": max,
    "Min": min,
    "Max": max,
    "math": math,
    "torch": torch,
}


def expression_of(value: Any) -> str:
    """Write a number, symbolic or not, as an expression for `value_of`."""
    node = getattr(value, "node", None)
    return str(_PRINTER.doprint(value if node is None else node.expr))


def value_of(expression: str, sizes: Sizes) -> Any:
    """Run an expression of a traced call; what comes out of files is `lowering.arithmetic`'s."""
    return eval(expression, _NAMES, dict(sizes))

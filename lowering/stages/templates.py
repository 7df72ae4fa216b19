"""Put what is written as text into a module, in place of an op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def replace_by(op: Any, text: str, arguments: Sequence[Any]) -> Any:
    """Replace an op of one result by the body of a function; return the new result.

    Args:
        op: goes away.
        text: of a module with one function.
        arguments: what it is called with.
    """
    from iree.compiler import ir

    with ir.InsertionPoint(op):
        value = _put(text, arguments, op.operation.location)
    op.operation.results[0].replace_all_uses_with(value)
    op.operation.erase()
    return value


def _put(text: str, arguments: Sequence[Any], location: Any) -> Any:
    """Put the body of a function at the insertion point; return what it returns."""
    from iree.compiler import ir

    module = ir.Module.parse(text)  # its ops live as long
    (function,) = module.body.operations
    block = function.regions[0].blocks[0]
    values = dict(zip(block.arguments, arguments, strict=True))
    for op in block.operations:
        operands = [values[operand] for operand in op.operands]
        if op.operation.name == "func.return":
            return operands[0]
        copy = op.operation.clone()
        copy.location = location
        for i, operand in enumerate(operands):
            copy.operands[i] = operand
        values.update(zip(op.operation.results, copy.results, strict=True))
    raise AssertionError("a function ends with a return")

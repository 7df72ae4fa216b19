"""Where the blocks of device code go on to, in the LLVM dialect: read, and changed."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.symbols import constant_of, maker_of


def successors(op: Any) -> list[Any]:
    """Return the blocks that an op goes on to, such that they outlive it."""
    blocks = list(op.operation.block.region.blocks)
    return [block for one in op.operation.successors for block in blocks if block == one]


def is_next(value: Any, k: Any) -> bool:
    """Say whether a value is one more than another."""
    is_sum = maker_of(value) == "llvm.add" and value.owner.operands[0] == k
    return is_sum and constant_of(value.owner.operands[1]) == 1


def go_on_elsewhere(header: Any) -> tuple[Any, Any]:
    """Have a loop go on to a new block; return that, and another new one, which goes on as before.

    Nothing refers to the old end when this returns: another op may take its place in memory, which
    the bindings would take for the one that is erased.
    """
    from iree.compiler import ir

    (*_, end) = header.operations
    body, leave = successors(end)
    attempt, others = (body.create_before() for _ in range(2))
    with ir.InsertionPoint(others):
        ir.Operation.create("llvm.br", operands=list(end.operands)[1:], successors=[body])
    with ir.InsertionPoint(end):
        branch(end.operands[0], attempt, leave)
    end.operation.erase()
    return attempt, others


def branch(condition: Any, one: Any, other: Any) -> None:
    """End a block: go on to one, or to another, of blocks without arguments."""
    from iree.compiler import ir

    sizes = ir.DenseI32ArrayAttr.get([1, 0, 0])
    ir.Operation.create(
        "llvm.cond_br",
        operands=[condition],
        successors=[one, other],
        attributes={"operandSegmentSizes": sizes},
    )

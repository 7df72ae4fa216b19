"""Arithmetic on indices goes into the op that reads by them: no device program of its own."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.structured import (
    inputs_of,
    is_arithmetic,
    is_elementwise,
    loops_of,
    maps_of,
    repeated_dims,
)
from lowering.stages.ir.symbols import maker_of, ops_of
from lowering.stages.ir.templates import copied


def index_inside(function: Any) -> None:
    """Compute indices where they are used, and read them where they lie once.

    IREE does not, as one is used for a whole row; where it is repeated for a row of unknown size,
    IREE would hold the row of equal indices on the stack.

    Before: %1 = linalg.generic ins(%i) { maxsi(%in, 0) }
            %2 = linalg.generic {(d0, d1) -> (d0)} ins(%1) { (d0, d1) -> %in }
            %3 = linalg.generic {(d0, d1) -> (d0, d1)} ins(%2) { tensor.extract %w[%in, %d1] }
    After:  %3 = linalg.generic {(d0, d1) -> (d0)} ins(%i) { tensor.extract %w[maxsi(%in, 0), %d1] }
    """
    for op in ops_of(function):
        if is_elementwise(op) and _reads_by_index(op):
            compute_inside(op)


def compute_inside(op: Any) -> None:
    """Compute in an op, number by number, what is made so from one other tensor for it to read."""
    for place in range(len(inputs_of(op))):
        while _is_of_one(op.operands[place]):
            _take_inside(op, place)


def _reads_by_index(op: Any) -> bool:
    return any(inner.name == "tensor.extract" for inner in ops_of(op))


def _is_of_one(value: Any) -> bool:
    """Say whether a value is made, number by number, from one other of its dtype, or repeats it."""
    if maker_of(value) != "linalg.generic":
        return False
    op = value.owner
    if repeated_dims(op):
        return True
    body = op.regions[0].blocks[0]
    maps = {str(text) for text in op.attributes["indexing_maps"]}
    return (
        is_elementwise(op)
        and [v.type for v in inputs_of(op)] == [value.type]
        and len(maps) == 1
        and is_arithmetic(op)
        and not any(True for _ in body.arguments[1].uses)  # what the result starts from
    )


def _take_inside(op: Any, place: int) -> None:
    from iree.compiler import ir

    maker, body = op.operands[place].owner, op.regions[0].blocks[0]
    taken = body.arguments[place]
    users = [(use.owner, use.operand_number) for use in taken.uses]
    with op.location, ir.InsertionPoint.at_block_begin(body):
        (result,) = copied(maker.regions[0].blocks[0], [taken])
    for user, i in users:
        user.operands[i] = result
    maps = maps_of(op)
    maps[place] = _through(maker, maps[place])
    op.attributes["indexing_maps"] = ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in maps])
    op.operands[place] = inputs_of(maker)[0]


def _through(maker: Any, read: Any) -> Any:
    """Say where a map that reads what an op makes reads what the op makes it from."""
    from iree.compiler import ir

    given, made = maps_of(maker)
    places = dict(zip(loops_of(made), read.results, strict=True))
    found = [places.get(loop, e) for loop, e in zip(loops_of(given), given.results, strict=True)]
    return ir.AffineMap.get(read.n_dims, 0, found)

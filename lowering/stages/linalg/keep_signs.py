"""Keep IREE from taking two pieces of a value, the first negated, for its halves exchanged."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.structured import RESHAPES
from lowering.stages.ir.symbols import maker_of, ops_of

_SLICE = "tensor.extract_slice"
_PUTS = frozenset({"tensor.concat", "tensor.insert_slice", *RESHAPES})


def keep_signs(function: Any) -> None:
    """Write negations that are put beside something else in a way that IREE does not know.

    IREE makes one program of what rotates halves (`cat((-x[..., h:], x[..., :h]), -1)`), and finds
    it in any two pieces of one value that together are of its type, the first negated: wrong
    numbers of `cat((-x[..., :h], x[..., h:]), -1)`, of pieces with strides, of rows that were cut
    before. Where pieces are inserted, it does not ask whether they are all of the value. So only
    halves stay as they are.

    Before: %0 = tensor.extract_slice %x[0, 0] [8, 4]; %1 = tensor.extract_slice %x[0, 4] [8, 4]
            %2 = linalg.generic {arith.negf} ins(%0); %3 = tensor.concat dim(1) %2, %1
    After:  the same with the sign bit flipped in %2: {arith.bitcast; arith.xori; arith.bitcast}
    Source: `matchCatNegateAndSlice` in IREE's RaiseSpecialOps.cpp.
    """
    for op in ops_of(function):
        negation = _negation(op)
        if negation is not None:
            readers = [use.owner.operation for use in op.results[0].uses]
            is_put = any(reader.name in _PUTS for reader in readers)
            if is_put and not all(_exchanges_halves(op, reader) for reader in readers):
                _flip_sign(negation)


def _negation(op: Any) -> Any:
    """Return the negation that an op of one operand begins with, or None."""
    if op.name != "linalg.generic" or len(op.operands) != 2:
        return None
    first, *_ = ops_of(op)
    return first if first.name == "arith.negf" else None


def _exchanges_halves(negated: Any, reader: Any) -> bool:
    """Say whether an op puts together the second half of all rows, negated, and the first."""
    if reader.name != "tensor.concat" or len(reader.operands) != 2:
        return False
    halves = [negated.operands[0], reader.operands[1]]
    if any(maker_of(half) != _SLICE for half in halves):
        return False
    pieces = [half.owner for half in halves]
    source, other = (piece.operands[0] for piece in pieces)
    is_cut = maker_of(source) == _SLICE
    if is_cut or other != source or reader.operands[0] != negated.results[0]:
        return False
    *rows, length = source.type.shape
    half = length // 2
    return all(
        list(piece.attributes["static_offsets"]) == [*(0 for _ in rows), start]
        and list(piece.attributes["static_sizes"])[-1] == half
        and set(piece.attributes["static_strides"]) == {1}
        for piece, start in zip(pieces, (half, 0), strict=True)
    )


def _flip_sign(negation: Any) -> None:
    from iree.compiler import ir

    kind = negation.results[0].type
    bits = ir.IntegerType.get_signless(kind.width)
    sign = ir.IntegerAttr.get(bits, -(1 << (kind.width - 1)))

    def write(name: str, result: Any, *operands: Any, **attributes: Any) -> Any:
        made = ir.Operation.create(
            f"arith.{name}", results=[result], operands=operands, attributes=attributes
        )
        return made.result

    with negation.location, ir.InsertionPoint(negation):
        number = write("bitcast", bits, negation.operands[0])
        flipped = write("xori", bits, number, write("constant", bits, value=sign))
        negation.results[0].replace_all_uses_with(write("bitcast", kind, flipped))
    negation.erase()

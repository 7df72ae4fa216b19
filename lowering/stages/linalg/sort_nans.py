"""Sort NaNs as PyTorch does: as the largest numbers."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.symbols import ops_of

# Of `arith.cmpf`: predicate -> which operand goes where it belongs if it is NaN.
_LESS_OR_EQUAL, _GREATER_OR_EQUAL, _UNORDERED = 5, 3, 14
_IN_PLACE = {_LESS_OR_EQUAL: 1, _GREATER_OR_EQUAL: 0}


def sort_nans(function: Any) -> None:
    """Let a sort take a NaN behind a number, or before one if it descends, for ordered.

    torch-mlir's comparison is false on NaN, so that such a pair is swapped, whatever its order.

    Before: %0 = arith.cmpf ole, %a, %b; tm_tensor.yield %0
    After:  %0 = arith.cmpf ole, %a, %b; %1 = arith.cmpf uno, %b, %b
            %2 = arith.ori %0, %1; tm_tensor.yield %2
    """
    from iree.compiler import ir

    for op in ops_of(function):
        if op.name != "tm_tensor.sort":
            continue
        for compare in ops_of(op):
            if compare.name != "arith.cmpf":
                continue
            predicate = compare.attributes["predicate"]
            number = compare.operands[_IN_PLACE[ir.IntegerAttr(predicate).value]]
            unordered = ir.IntegerAttr.get(ir.IntegerAttr(predicate).type, _UNORDERED)
            (reader,) = (use.owner.operation for use in compare.result.uses)
            with compare.location, ir.InsertionPoint(reader):
                is_nan = compare.clone()
                is_nan.attributes["predicate"] = unordered
                is_nan.operands[0] = is_nan.operands[1] = number
                either = ir.Operation.create(
                    "arith.ori",
                    results=[compare.result.type],
                    operands=[compare.result, is_nan.result],
                )
            reader.operands[0] = either.result

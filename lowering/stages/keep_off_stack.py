"""Keep IREE from putting whole tensors on the stack, which it then refuses."""

from __future__ import annotations

from typing import Any

from lowering.stages.barrier import behind_barrier
from lowering.stages.structured import inputs_of, is_of_nothing

_PUTS = frozenset({"tensor.concat", "tensor.insert_slice", "tensor.pad"})


def keep_off_stack(function: Any) -> None:
    """Let sorts, scans and scatters read memory, and write what they made into memory of their own.

    What IREE makes in the same device program for a scatter to put, what is left of a sort of which
    only one result is read, and what a scan makes for a part of a larger tensor, has no place in
    memory. Room on the stack it gives to tensors of static sizes alone, and of few bytes.

    Before: %0 = linalg.fill 0.0; %1 = tm_tensor.scatter ins(%0, %i) outs(%x)
            %2:2 = tm_tensor.sort outs(%keys, %places); return %1, tensor.pad %2#1
    After:  %b = util.optimization_barrier %0; %1 = tm_tensor.scatter ins(%b, %i) outs(%x)
            %2:2 = tm_tensor.sort outs(%keys, %places); %c = util.optimization_barrier %2#0
            %d = util.optimization_barrier %2#1; return %1, tensor.pad %d
    """
    from iree.compiler import ir

    ops = list(function.regions[0].blocks[0].operations)
    for op in (op.operation for op in ops if op.operation.name.startswith("tm_tensor.")):
        with op.location:
            for i, value in enumerate(inputs_of(op)):
                is_made = not isinstance(value.owner, ir.Block) and is_of_nothing(value.owner)
                if is_made and _is_dynamic(value):
                    with ir.InsertionPoint(op):
                        op.operands[i] = behind_barrier(value)
            for result in op.results:
                uses = [(use.owner.operation, use.operand_number) for use in result.uses]
                is_left = not uses and len(op.results) > 1 and _is_dynamic(result)
                if is_left or any(user.name in _PUTS for user, _ in uses):
                    with ir.InsertionPoint.after(op):
                        kept = behind_barrier(result)
                    for user, place in uses:
                        user.operands[place] = kept


def _is_dynamic(value: Any) -> bool:
    from iree.compiler import ir

    return not ir.RankedTensorType(value.type).has_static_shape

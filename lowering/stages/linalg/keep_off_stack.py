"""Keep IREE from putting whole tensors on the stack, which it then refuses."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.barrier import behind_barrier, read_behind_barrier
from lowering.stages.ir.structured import inputs_of, is_of_nothing
from lowering.stages.ir.symbols import maker_of, ops_of
from lowering.stages.ir.types import sizes_of

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
    for op in ops_of(function):
        if not op.name.startswith("tm_tensor."):
            continue
        _keep_read(op)
        for result in op.results:
            readers = {use.owner.operation.name for use in result.uses}
            is_left = not readers and len(op.results) > 1 and None in sizes_of(result.type)
            if is_left or readers & _PUTS:
                read_behind_barrier(result)


def _keep_read(op: Any) -> None:
    from iree.compiler import ir

    for i, value in enumerate(inputs_of(op)):
        is_made = maker_of(value) and is_of_nothing(value.owner)
        if is_made and None in sizes_of(value.type):
            with op.location, ir.InsertionPoint(op):
                op.operands[i] = behind_barrier(value)

"""Give each op that writes into a constant tensor one of its own."""

from __future__ import annotations

from typing import Any

from lowering.stages.barrier import behind_barrier
from lowering.stages.keep_arguments import only_reads
from lowering.stages.structured import inputs_of

_FILLS = frozenset({"linalg.fill", "linalg.generic"})


def separate_fills(function: Any) -> None:
    """Fill a tensor again for each op that overwrites it, if somebody else reads it, too.

    IREE lets such ops share one buffer where the sizes of the tensor and of what is written come
    from different computations, as torch-mlir's dynamic ones do: two scatters into one `zeros`
    then end up in one result, and the other is whatever was there.

    Before: %z = linalg.fill ins(%c) outs(%empty); %0 = scatter outs(%z); %1 = scatter outs(%z)
    After:  %z = linalg.fill ins(%c) outs(%empty); %0 = scatter outs(%z)
            %d = util.optimization_barrier %c; %y = linalg.fill ins(%d) outs(%empty)
            %1 = scatter outs(%y)
    """
    for op in list(function.regions[0].blocks[0].operations):
        if not (op.operation.name.startswith("tm_tensor.") or _inserts_at_any_place(op)):
            continue
        for i, operand in enumerate(list(op.operands)):
            if not only_reads(op, i) and _is_shared_fill(operand):
                op.operation.operands[i] = _filled_again(op, operand.owner)


def _inserts_at_any_place(op: Any) -> bool:
    return (
        op.operation.name == "tensor.insert_slice"
        and not op.operation.results[0].type.has_static_shape
    )


def _is_shared_fill(value: Any) -> bool:
    from iree.compiler import ir

    if not isinstance(value.owner, ir.Operation | ir.OpView) or len(list(value.uses)) < 2:
        return False
    fill = value.owner
    inputs = inputs_of(fill)
    is_constant = len(inputs) == 1 and not _has_dimensions(inputs[0])
    return fill.operation.name in _FILLS and is_constant


def _has_dimensions(value: Any) -> bool:
    from iree.compiler import ir

    return isinstance(value.type, ir.RankedTensorType) and value.type.rank > 0


def _filled_again(op: Any, fill: Any) -> Any:
    """Copy a fill to before an op; a barrier keeps the two apart until buffers are assigned."""
    from iree.compiler import ir

    with op.operation.location, ir.InsertionPoint(op):
        constant = behind_barrier(fill.operands[0], stays=True)
        again = fill.operation.clone()
    again.operation.operands[0] = constant
    return again.results[0]

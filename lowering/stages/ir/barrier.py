"""A value again, such that the compiler cannot merge the two while it forms dispatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowering.stages.ir.symbols import walk
from lowering.stages.ir.tensors import size_of
from lowering.stages.ir.types import sizes_of

_STAYS = "npu_iree.stays"


def behind_barrier(value: Any, *, stays: bool = False, after: Sequence[Any] = ()) -> Any:
    """Put a barrier at the insertion point; its result has the dynamic sizes of the value.

    With `stays` it holds until buffers are assigned, too, at the price of a wait of the host.
    It is there once the values of `after` are, too.

    IREE finds no sizes behind a barrier on its own ("tensor.dim op unexpected during shape
    cleanup"), so they are tied to it.

    Before: %0 of tensor<?x1xf32>
    After:  %n = tensor.dim %0, %c0; %1 = util.optimization_barrier %0
            %2 = flow.tensor.tie_shape %1 : tensor<?x1xf32>{%n}
    """
    from iree.compiler import ir

    barrier = ir.Operation.create(
        "util.optimization_barrier",
        results=[value.type, *(other.type for other in after)],
        operands=[value, *after],
        attributes={_STAYS: ir.UnitAttr.get()} if stays else {},
    ).results[0]
    known = enumerate(sizes_of(value.type))
    sizes = [size_of(value, d) for d, size in known if size is None]
    if not sizes:
        return barrier
    tied = ir.Operation.create(
        "flow.tensor.tie_shape", results=[value.type], operands=[barrier, *sizes]
    )
    return tied.result


def put_barriers(op: Any, places: Sequence[int]) -> None:
    """Put a barrier before an op at some of its operands, for it alone."""
    from iree.compiler import ir

    operation = op.operation
    with operation.location, ir.InsertionPoint(operation):
        for place in places:
            operation.operands[place] = behind_barrier(operation.operands[place])


def read_behind_barrier(value: Any) -> None:
    """Put a barrier right behind what makes a value, for all that read it, if anything does."""
    from iree.compiler import ir

    uses = [(use.owner.operation, use.operand_number) for use in value.uses]
    with value.owner.location, ir.InsertionPoint.after(value.owner):
        barrier = behind_barrier(value)
    for user, place in uses:
        user.operands[place] = barrier


def drop_barriers(module: Any) -> None:
    """Take the barriers out of a module whose dispatches are formed, but for those made to stay.

    Nothing is fused any more, and later phases would have the host wait for the bytes, in the
    middle of a call.

    Before: %0 = flow.dispatch @a; %1 = util.optimization_barrier %0; %2 = flow.dispatch @b(%1)
    After:  %0 = flow.dispatch @a; %2 = flow.dispatch @b(%0)
    """
    for barrier in [op for op in walk(module) if op.name == "util.optimization_barrier"]:
        if _STAYS not in barrier.attributes:
            for result, operand in zip(barrier.results, barrier.operands, strict=True):
                result.replace_all_uses_with(operand)
            barrier.erase()

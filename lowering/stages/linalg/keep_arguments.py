"""Keep IREE from overwriting the arguments of a call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lowering.stages.ir.structured import VIEWS, inputs_of

_READS = frozenset({"tensor.concat", "tensor.dim", "tensor.extract", "tensor.pad", "func.return"})


def keep_arguments(function: Any, given: Collection[int] = ()) -> None:
    """Return arguments that an op would overwrite, so that IREE copies them first.

    IREE takes an imported buffer that is not read any more for scratch, although the caller has
    not given it away (`iree.abi.consume` is not set): sorting a tensor would sort the user's own.
    What is returned is read until the end. The runtime ignores the added results.

    Before: func.func @main(%arg0) { %0 = tm_tensor.sort outs(%arg0); return %0 }
    After:  func.func @main(%arg0) { %0 = tm_tensor.sort outs(%arg0); return %0, %arg0 }

    Args:
        function: an entry point.
        given: the positions of the arguments that the caller does give away.
    """
    from iree.compiler import ir

    block = function.regions[0].blocks[0]
    own = [a for i, a in enumerate(block.arguments) if i not in given]
    tensors = [a for a in own if str(a.type).startswith("tensor<")]
    kept = [argument for argument in tensors if _is_overwritten(argument)]
    if not kept:
        return
    end = block.operations[len(block.operations) - 1]
    with ir.InsertionPoint(end):
        ir.Operation.create("func.return", operands=[*end.operands, *kept])
    end.operation.erase()
    kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    results = [*kind.results, *(argument.type for argument in kept)]
    function.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(kind.inputs, results)
    )
    if "res_attrs" in function.attributes:
        del function.attributes["res_attrs"]


def _is_overwritten(value: Any) -> bool:
    for use in value.uses:
        op, index = use.owner, use.operand_number
        name = op.operation.name
        if name in VIEWS and index == 0:
            if any(_is_overwritten(result) for result in op.results):
                return True
        elif not (name in _READS or only_reads(op, index)):
            return True
    return False


def only_reads(op: Any, index: int) -> bool:
    """Say whether an op does no more than read its operand `index`."""
    name = op.operation.name
    if name == "tensor.insert_slice":
        return index != 1  # the tensor that is inserted into
    return name.startswith(("linalg.", "tm_tensor.")) and index < len(inputs_of(op))

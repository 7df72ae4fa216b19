"""Device programs in IREE's flow dialect: their functions, where they are dispatched, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowering.stages.ir.dispatch_work import LOAD, STORE, walk
from lowering.stages.ir.symbols import inside, maker_of, symbol_of
from lowering.stages.ir.templates import put

DISPATCH, EXECUTABLE, EXPORT = "flow.dispatch", "flow.executable", "flow.executable.export"
_COUNTS = """
func.func @counts() -> (index, index, index) {{
  %x = arith.constant {counts[0]} : index
  %y = arith.constant {counts[1]} : index
  %z = arith.constant {counts[2]} : index
  return %x, %y, %z : index, index, index
}}
"""


def functions_of(executable: Any) -> list[Any]:
    """Return the functions of a device program."""
    modules = inside(executable, "builtin.module")
    return [function for module in modules for function in inside(module, "func.func")]


def set_type(function: Any) -> None:
    """Have a function take what its block does."""
    from iree.compiler import ir

    arguments = [argument.type for argument in function.regions[0].blocks[0].arguments]
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(arguments, []))


def argument_type(access: str, kind: Any) -> Any:
    """Return the type of an argument, from the access to it (`readonly`) and that of a tensor."""
    from iree.compiler import ir

    return ir.Type.parse(f"!iree_tensor_ext.dispatch.tensor<{access}:{kind}>")


def entry_of(dispatch: Any) -> str:
    """Return the name of the device program that is dispatched."""
    (entry,) = dispatch.attributes["entry_points"]
    return str(entry.value[0])


def dispatches_of(module: Any, executable: Any) -> list[Any]:
    """Return where a device program is dispatched."""
    name = symbol_of(executable)
    return [op for op in walk(module) if op.name == DISPATCH and entry_of(op) == name]


def place_of(dispatch: Any, argument: Any) -> int:
    """Return which operand of a dispatch is an argument of the function."""
    workload, *_ = dispatch.attributes["operandSegmentSizes"]
    return int(workload) + int(argument.arg_number)


def set_workgroups(executable: Any, counts: Sequence[int]) -> None:
    """Have a device program run as so many work items, in three dimensions."""
    from iree.compiler import ir

    (export,) = inside(executable, EXPORT)
    *ops, end = export.regions[0].blocks[0].operations
    with ir.InsertionPoint(end), end.operation.location:
        for i, count in enumerate(put(_COUNTS.format(counts=counts), [])):
            end.operation.operands[i] = count
    for op in reversed(ops):
        op.operation.erase()


def is_at(op: Any, begin: Sequence[int]) -> bool:
    """Say whether a load or a store begins there, and has every number from there on."""
    is_known = len(op.operands) == (2 if op.name == STORE else 1)
    offsets, steps = (list(op.attributes[f"static_{name}"]) for name in ("offsets", "strides"))
    return is_known and offsets == list(begin) and set(steps) <= {1}


def is_loaded(value: Any) -> bool:
    """Say whether a value is what an argument has from its begin on."""
    return maker_of(value) == LOAD and is_at(value.owner, [0] * len(value.type.shape))

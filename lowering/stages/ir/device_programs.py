"""Device programs in IREE's flow dialect: their functions, where they are dispatched, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowering.stages.ir.dispatch_work import FLOPS, LOAD, STORE, walk
from lowering.stages.ir.symbols import inside, maker_of, symbol_of
from lowering.stages.ir.templates import put

DISPATCH, EXECUTABLE, EXPORT = "flow.dispatch", "flow.executable", "flow.executable.export"
# A program that does nothing yet.
_PROGRAM = """
flow.executable private @{name} {{
  flow.executable.export public @{entry} workgroups() -> (index, index, index) {{
    %x, %y, %z = iree_tensor_ext.dispatch.workgroup_count_from_slice()
    flow.return %x, %y, %z : index, index, index
  }}
  builtin.module {{
    func.func @{entry}({arguments}) {attributes} {{
      return
    }}
  }}
}}
"""
_COUNTS = """
func.func @counts() -> (index, index, index) {{
  %x = arith.constant {counts[0]} : index
  %y = arith.constant {counts[1]} : index
  %z = arith.constant {counts[2]} : index
  return %x, %y, %z : index, index, index
}}
"""


def put_program(name: str, entry: str, arguments: str, attributes: str = "") -> Any:
    """Put a device program that does nothing yet at the insertion point; return it.

    Args:
        name: of the program.
        entry: name of its function.
        arguments: of the function, as MLIR writes them.
        attributes: of the function, as MLIR writes them.
    """
    from iree.compiler import ir

    text = _PROGRAM.format(name=name, entry=entry, arguments=arguments, attributes=attributes)
    module = ir.Module.parse(text)  # its ops live as long
    return module.body.operations[0].operation.clone()


def put_dispatch(executable: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """Dispatch a device program at the insertion point; return the op.

    Args:
        executable: the program.
        operands: tensors of known sizes.
        results: types of such tensors.
    """
    from iree.compiler import ir

    return ir.Operation.create(
        DISPATCH,
        results=results,
        operands=operands,
        attributes={
            "entry_points": entries_of(executable),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([0, len(operands), 0, 0]),
        },
    )


def entries_of(executable: Any) -> Any:
    """Return the attribute of what dispatches a program of one function."""
    from iree.compiler import ir

    (function,) = functions_of(executable)
    name = ir.SymbolRefAttr.get([symbol_of(executable), symbol_of(function)])
    return ir.ArrayAttr.get([name])


def tell_flops(function: Any, count: int) -> None:
    """Tell how much arithmetic a function is, whose loops do not say so."""
    from iree.compiler import ir

    function.attributes[FLOPS] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), count)


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
    """Say whether a load or a store begins there, and has all numbers up to where it ends."""
    is_known = len(op.operands) == (2 if op.name == STORE else 1)
    offsets, steps = (list(op.attributes[f"static_{name}"]) for name in ("offsets", "strides"))
    return is_known and offsets == list(begin) and set(steps) <= {1}


def is_loaded(value: Any) -> bool:
    """Say whether a value is what an argument has from its begin on: all of it, or less."""
    return maker_of(value) == LOAD and is_at(value.owner, [0] * len(value.type.shape))


def is_whole(op: Any) -> bool:
    """Say whether a load or a store is of all that the argument has, in its shape."""
    value, argument = op.operands if op.name == STORE else (op.results[0], op.operands[0])
    is_all = str(argument.type).endswith(f":{value.type}>")
    return is_all and is_at(op, [0] * len(value.type.shape))

"""Device programs in IREE's flow dialect: their functions, where they are dispatched, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowering.stages.ir.symbols import inside, maker_of, symbol_of, walk
from lowering.stages.ir.templates import put
from lowering.stages.ir.types import sizes_of

# A tensor, or the type of one, and the values of its sizes that are not known.
Sized = tuple[Any, Sequence[Any]]
DISPATCH, EXECUTABLE, EXPORT = "flow.dispatch", "flow.executable", "flow.executable.export"
LOAD, STORE = "iree_tensor_ext.dispatch.tensor.load", "iree_tensor_ext.dispatch.tensor.store"
RESHAPE = "flow.tensor.reshape"
FLOPS = "npu_iree.flops"  # of a function: those of loops whose steps depend on their place
_TIED = "flow.dispatch.tie_shape"
# A program that does nothing yet.
_PROGRAM = """
flow.executable private @{name} {{
  flow.executable.export public @{entry} workgroups({sizes}) -> (index, index, index) {{
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


def put_program(
    name: str, entry: str, arguments: str, attributes: str = "", *, unknown: int = 0
) -> Any:
    """Put a device program that does nothing yet at the insertion point; return it.

    Args:
        name: of the program.
        entry: name of its function.
        arguments: of the function, as MLIR writes them.
        attributes: of the function, as MLIR writes them.
        unknown: how many sizes say how many work items there are.
    """
    from iree.compiler import ir

    sizes = ", ".join(f"%s{i}: index" for i in range(unknown))
    text = _PROGRAM.format(
        name=name, entry=entry, sizes=sizes, arguments=arguments, attributes=attributes
    )
    module = ir.Module.parse(text)  # its ops live as long
    return module.body.operations[0].operation.clone()


def put_dispatch(
    executable: Any,
    operands: Sequence[Sized],
    results: Sequence[Sized],
    unknown: Sequence[Any] = (),
) -> Any:
    """Dispatch a device program at the insertion point; return the op.

    Args:
        executable: the program.
        operands: tensors, with their unknown sizes.
        results: types of tensors, with their unknown sizes.
        unknown: the sizes that say how many work items there are; the program takes them first.
    """
    from iree.compiler import ir

    taken = [*unknown, *(value for value, _ in operands)]
    given, made = (
        [size for _, sizes in tensors for size in sizes] for tensors in (operands, results)
    )
    counts = [len(unknown), len(taken), len(given), len(made)]
    return ir.Operation.create(
        DISPATCH,
        results=[kind for kind, _ in results],
        operands=[*unknown, *taken, *given, *made],
        attributes={
            "entry_points": entries_of(executable),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get(counts),
        },
    )


def reshaped(given: Sized, wanted: Sized) -> Sized:
    """Give a tensor in the shape of a type, where programs are dispatched."""
    from iree.compiler import ir

    (value, sizes), (kind, new_sizes) = given, wanted
    if value.type == kind and list(sizes) == list(new_sizes):
        return given
    segments = ir.DenseI32ArrayAttr.get([1, len(sizes), len(new_sizes)])
    reshape = ir.Operation.create(
        RESHAPE,
        results=[kind],
        operands=[value, *sizes, *new_sizes],
        attributes={"operandSegmentSizes": segments},
    )
    return reshape.result, new_sizes


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


def segments_of(op: Any) -> list[list[Any]]:
    """Return the operands of an op that has several lists of them: a dispatch, a load, ..."""
    operands = iter(op.operands)
    return [[next(operands) for _ in range(n)] for n in op.attributes["operandSegmentSizes"]]


def taken_by(dispatch: Any) -> list[Sized]:
    """Return what a dispatch gives its program."""
    _, taken, sizes, _ = segments_of(dispatch)
    return _with_sizes(taken, sizes)


def results_of(dispatch: Any) -> list[Sized]:
    """Return the results of a dispatch."""
    *_, sizes = segments_of(dispatch)
    return _with_sizes(list(dispatch.results), sizes)


def made_by(dispatch: Any) -> list[Any]:
    """Return the results of a dispatch that are not written into what it takes."""
    is_tied = "tied_operands" in dispatch.attributes
    tied = dispatch.attributes["tied_operands"] if is_tied else [-1] * len(dispatch.results)
    pairs = zip(dispatch.results, tied, strict=True)
    return [result for result, place in pairs if getattr(place, "value", place) < 0]


def _with_sizes(values: Sequence[Any], sizes: Sequence[Any]) -> list[Sized]:
    rest = iter(sizes)
    unknown = [sizes_of(value.type).count(None) for value in values]
    return [
        (value, [next(rest) for _ in range(n)]) for value, n in zip(values, unknown, strict=True)
    ]


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
    compute_workgroups(executable, _COUNTS.format(counts=counts))


def compute_workgroups(executable: Any, text: str) -> None:
    """Have a device program run as many work items, in three dimensions, as a function returns.

    Args:
        executable: the program.
        text: of a module with the function, which is called with the program's unknown sizes.
    """
    from iree.compiler import ir

    (export,) = inside(executable, EXPORT)
    (block,) = export.regions[0].blocks
    *ops, end = block.operations
    with ir.InsertionPoint(end), end.operation.location:
        for i, count in enumerate(put(text, list(block.arguments))):
            end.operation.operands[i] = count
    for op in reversed(ops):
        op.operation.erase()


def argument_of(value: Any) -> Any:
    """Return the argument of a function that is loaded or stored to, without what sizes it has."""
    return value.owner.operands[0] if maker_of(value) == _TIED else value


def sizes_in_program(value: Any) -> list[Any]:
    """Return the unknown sizes of what is loaded or stored to, as values of the function."""
    return list(value.owner.operands)[1:] if maker_of(value) == _TIED else []


def is_at(op: Any, begin: Sequence[int]) -> bool:
    """Say whether a load or store begins there: of all up to the end, or less."""
    *_, whole, offsets, sizes, steps = segments_of(op)
    begins, apart = (list(op.attributes[f"static_{name}"]) for name in ("offsets", "strides"))
    is_known = not (offsets or steps) and sizes == whole
    return is_known and begins == list(begin) and set(apart) <= {1}


def is_loaded(value: Any) -> bool:
    """Say whether a value is what an argument has from its begin on: all of it, or less."""
    return maker_of(value) == LOAD and is_at(value.owner, [0] * len(value.type.shape))


def is_whole(op: Any) -> bool:
    """Say whether a load or a store is of all that the argument has, in its shape."""
    value, argument = op.operands[:2] if op.name == STORE else (op.results[0], op.operands[0])
    is_all = str(argument.type).endswith(f":{value.type}>")
    return is_all and is_at(op, [0] * len(value.type.shape))

"""Stage 4: flow to an IREE module (.vmfb), with a function that binds each parameter anew."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lowering.abi import PARAMETER_SCOPE, bind_function
from lowering.stages import CompileOptions, Stage
from lowering.stages.iree_session import IreeSession
from lowering.stages.read_ahead import read_ahead

_DATA_TILING = "--iree-opt-data-tiling"
_PARAMETER = re.compile(rf'#flow\.parameter\.named<"{PARAMETER_SCOPE}"::"(?P<name>[^"]+)">')


def flow_to_vmfb(flow_asm: str, options: CompileOptions) -> bytes:
    """Compile flow IR to a .vmfb.

    IREE has hoisted what depends on parameters alone (packing, transposing) into initializers.
    With `options.rebind` each is written again as a function, so that one changed weight can be
    bound without loading the module, and so the other weights, again:

    Before: util.initializer { %w = util.global.load immutable @p0
                               %0 = flow.tensor.encode %w; util.global.store %0, @packed }
    After:  the same, and
            util.func public @bind$p0(%view, %wait, %signal) {
                %w = hal.tensor.import wait(%wait) => %view
                %0 = flow.tensor.encode %w; util.global.store %0, @packed
                hal.tensor.barrier join(%0) => %signal }

    With data tiling, products read ahead (`lowering.stages.read_ahead`): `iree-compile
    --compile-from=flow` on the same input gives the same code without that.

    Args:
        flow_asm: one module, as `linalg-to-flow` leaves it.
        options: `flags` go to IREE as they are; `parameters` and `rebind`: see above.

    Raises:
        RuntimeError: the compiler refused the module; the text is what it said.
    Source: `iree-compile --compile-from=flow`; initializers come from IREE's
        `iree-util-hoist-into-globals`.
    """
    from iree.compiler.api import Output

    with IreeSession(options) as session:
        module = session.parse(flow_asm)
        with session.context:
            if options.rebind:
                names = dict.fromkeys(itertools.chain.from_iterable(options.parameters.values()))
                _add_bind_functions(module, list(names))
        output = Output.open_membuffer()
        begin = "flow"
        if _DATA_TILING in options.flags:
            session.compile(module, begin=begin, end="executable-targets")
            with session.context:
                read_ahead(module)
            begin = "executable-targets"
        session.compile(module, begin=begin).output_vm_bytecode(output)
        return bytes(output.map_memory())


def _add_bind_functions(module: Any, parameters: Sequence[str]) -> None:
    """Add a bind function for every parameter, and let what they store be stored again."""
    from iree.compiler import ir

    ops = list(module.body.operations)
    raw = {_global_name(op): (name, op) for op in ops if (name := _parameter_of(op))}
    initializers = [op for op in ops if op.operation.name == "util.initializer"]
    if any(len(op.regions[0].blocks) != 1 for op in initializers):
        return  # control flow in an initializer: the module is loaded again instead
    read = _read_by_functions(ops)
    stored: set[str] = set()
    with ir.Location.unknown(), ir.InsertionPoint(module.body):
        for name in parameters:
            own = {symbol: op for symbol, (parameter, op) in raw.items() if parameter == name}
            dependent = _dependent(initializers, own)
            shared = [i for i in dependent if not own.keys() >= raw.keys() & _loads(i)]
            kept = {s for s in own if s in read or any(s in _loads(i) for i in shared)}
            stored |= kept.union(*(_symbols(i, "util.global.store") for i in dependent))
            _add_bind_function(name, own, kept, dependent)
    _make_mutable(module, stored)


def _add_bind_function(
    name: str, raw: Mapping[str, Any], kept: set[str], initializers: Sequence[Any]
) -> None:
    """Write `@bind$name(view, wait, signal)`: what the initializers make of the new value.

    Args:
        name: the parameter.
        raw: its globals.
        kept: those of them that more than its own initializers read.
        initializers: those that depend on it, in order.
    """
    from iree.compiler import ir

    view, fence = ir.Type.parse("!hal.buffer_view"), ir.Type.parse("!hal.fence")
    kind = ir.FunctionType.get([view, fence, fence], [])
    function = ir.Operation.create(
        "util.func",
        regions=1,
        attributes={
            "sym_name": ir.StringAttr.get(bind_function(name)),
            "sym_visibility": ir.StringAttr.get("public"),
            "function_type": ir.TypeAttr.get(kind),
            "iree.abi.stub": ir.UnitAttr.get(),
        },
    )
    block = function.regions[0].blocks.append(view, fence, fence)
    source, wait, signal = block.arguments
    with ir.InsertionPoint(block):
        made: list[Any] = []
        values: dict[str, Any] = {}
        for symbol, global_op in raw.items():
            values[symbol] = _import(source, wait, global_op.attributes["type"])
            if symbol in kept:
                _store(values[symbol], symbol)
                made.append(values[symbol])
        for initializer in initializers:
            made += _inline(initializer, values)
        if made:
            kinds = [value.type for value in made]
            ir.Operation.create("hal.tensor.barrier", results=kinds, operands=[*made, signal])
        else:  # the result does not depend on the parameter
            ir.Operation.create("hal.fence.signal", operands=[signal])
        ir.Operation.create("util.return")


def _import(source: Any, wait: Any, kind: Any) -> Any:
    from iree.compiler import ir

    segments = ir.DenseI32ArrayAttr.get([1, 0, 1, 0])  # source, dimensions, fence, affinity
    return ir.Operation.create(
        "hal.tensor.import",
        results=[kind.value],
        operands=[source, wait],
        attributes={"target_encoding": kind, "operandSegmentSizes": segments},
    ).result


def _inline(initializer: Any, raw: Mapping[str, Any]) -> list[Any]:
    """Copy an initializer's ops to the insertion point; return the tensors that it stores.

    Args:
        initializer: one block of straight code.
        raw: values that stand for the loads of these globals.
    """
    values: dict[Any, Any] = {}
    stored = []
    for op in initializer.regions[0].blocks[0].operations:
        if op.operation.name == "util.return":
            continue
        if op.operation.name == "util.global.load" and op.attributes["global"].value in raw:
            values[op.results[0]] = raw[op.attributes["global"].value]
            continue
        copy = op.operation.clone()
        for i, operand in enumerate(op.operands):
            copy.operands[i] = values.get(operand, operand)
        values.update(zip(op.results, copy.results, strict=True))
        if op.operation.name == "util.global.store":
            stored.append(copy.operands[0])
    return stored


def _read_by_functions(ops: Iterable[Any]) -> set[str]:
    """Give the globals that are loaded elsewhere than in initializers."""
    from iree.compiler import ir

    found: set[str] = set()

    def visit(op: Any) -> Any:
        if op.name == "util.global.load":
            found.add(op.attributes["global"].value)
        return ir.WalkResult.ADVANCE

    for op in ops:
        if op.operation.name == "util.func":
            op.operation.walk(visit)
    return found


def _loads(initializer: Any) -> set[str]:
    return set(_symbols(initializer, "util.global.load"))


def _store(value: Any, symbol: str) -> None:
    from iree.compiler import ir

    ir.Operation.create(
        "util.global.store",
        operands=[value],
        attributes={"global": ir.FlatSymbolRefAttr.get(symbol)},
    )


def _dependent(initializers: Iterable[Any], raw: Iterable[str]) -> list[Any]:
    """Give the initializers that read one of `raw`, or what another of them makes of it."""
    changed, found = set(raw), []
    for op in initializers:
        if changed.intersection(_symbols(op, "util.global.load")):
            changed.update(_symbols(op, "util.global.store"))
            found.append(op)
    return found


def _symbols(op: Any, kind: str) -> list[str]:
    """Give the globals that the ops of one kind in an initializer name."""
    inner = op.regions[0].blocks[0].operations
    return [o.attributes["global"].value for o in inner if o.operation.name == kind]


def _make_mutable(module: Any, symbols: set[str]) -> None:
    from iree.compiler import ir

    def visit(op: Any) -> Any:
        attributes = op.attributes
        if op.name == "util.global" and attributes["sym_name"].value in symbols:
            attributes["is_mutable"] = ir.UnitAttr.get()
        elif op.name == "util.global.load" and attributes["global"].value in symbols:
            _discard(attributes, "is_immutable")
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)


def _discard(attributes: Any, name: str) -> None:
    if name in attributes:
        del attributes[name]


def _global_name(op: Any) -> str:
    is_global = op.operation.name == "util.global"
    return str(op.attributes["sym_name"].value) if is_global else ""


def _parameter_of(op: Any) -> str | None:
    if not _global_name(op) or "initial_value" not in op.attributes:
        return None
    found = _PARAMETER.search(str(op.attributes["initial_value"]))
    return found["name"] if found else None


def _is_module(vmfb: bytes) -> str | None:
    return None if len(vmfb) > 64 else "the compiler wrote an empty module"


FLOW_TO_VMFB = Stage("flow-to-vmfb", "vmfb", flow_to_vmfb, _is_module)

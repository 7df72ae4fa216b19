"""Functions that bind a changed parameter: one for all that are made ready in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from lowering.abi import BOUND, PARAMETER_SCOPE, bind_function

_PARAMETER = re.compile(rf'#flow\.parameter\.named<"{PARAMETER_SCOPE}"::"(?P<name>[^"]+)">')


def add_bind_functions(module: Any, parameters: Sequence[str]) -> None:
    """Add functions that bind one parameter anew, and let what they store be stored again.

    IREE has hoisted what depends on parameters alone (packing, transposing) into initializers.
    Those are written again as functions. A function costs 10 to 40 ms of a compile, and a model has
    hundreds of parameters but few forms of them: what differs in nothing but the names of globals
    is one function, which is told whose globals it reads and writes.

    Before: util.initializer { %w = util.global.load immutable @p0
                               %0 = flow.tensor.encode %w; util.global.store %0, @packed0 }
            the same of @p1 and @packed1
    After:  the same, and
            util.func public @bind$0(%view, %which: i32, %wait, %signal) {
                %buffer = hal.buffer_view.buffer %view
                %w = hal.tensor.import wait(%wait) => %buffer
                %0 = flow.tensor.encode %w
                hal.tensor.barrier join(%0) => %signal
                cf.switch %which [default: ^first, 1: ^second]
              ^first:  util.global.store %0, @packed0; util.return
              ^second: util.global.store %0, @packed1; util.return }

    What depends on several parameters has functions of its own, without the view: they run after
    those of the parameters.

    A module whose initializers have control flow gets none: it is loaded again instead.

    Args:
        module: one in flow, as `linalg-to-flow` leaves it.
        parameters: their names.
    Source: initializers come from IREE's `iree-util-hoist-into-globals`.
    """
    from iree.compiler import ir

    ops = list(module.body.operations)
    found = [op for op in ops if op.operation.name == "util.initializer"]
    if any(len(op.regions[0].blocks) != 1 for op in found):
        return
    raw = {_symbol(op): (name, op) for op in ops if (name := _parameter_of(op))}
    initializers = _initializers(found, {symbol: name for symbol, (name, _) in raw.items()})
    of_several = [i for i in initializers if len(i.parameters) > 1]
    read = _read_by_functions(ops).union(*(i.loads for i in of_several))
    bindings = []
    for name in parameters:
        own = {symbol: op for symbol, (parameter, op) in raw.items() if parameter == name}
        alone = [i for i in initializers if i.parameters == {name}]
        bindings.append(_Binding.of(name, own, read & own.keys(), alone))
    bindings += [_Binding.of(",".join(sorted(i.parameters)), {}, (), [i]) for i in of_several]
    forms: dict[str, list[tuple[int, _Binding]]] = {}
    for step, binding in enumerate(bindings):
        forms.setdefault(binding.form, []).append((step, binding))
    with ir.Location.unknown(), ir.InsertionPoint(module.body):
        for number, members in enumerate(forms.values()):
            _add_function(number, members)
    _make_mutable(module, {symbol for binding in bindings for symbol, _ in binding.stores})


@dataclass(frozen=True)
class _Initializer:
    """One block of straight code that reads and writes globals.

    Attributes:
        ops: the code.
        loads: the globals that it reads.
        stores: those that it writes.
        parameters: the names of those that these depend on.
    """

    ops: Sequence[Any]
    loads: frozenset[str]
    stores: frozenset[str]
    parameters: frozenset[str]


def _initializers(ops: Sequence[Any], raw: Mapping[str, str]) -> list[_Initializer]:
    """Find out what each initializer depends on.

    Args:
        ops: the initializers, in order.
        raw: the parameters that globals hold, by the globals' names.
    """
    names = {symbol: frozenset([parameter]) for symbol, parameter in raw.items()}
    initializers = []
    for op in ops:
        inner = [o.operation for o in op.regions[0].blocks[0].operations]
        loads, stores = (
            frozenset(o.attributes["global"].value for o in inner if o.name == kind)
            for kind in ("util.global.load", "util.global.store")
        )
        parameters = frozenset[str]().union(*(names.get(symbol, ()) for symbol in loads))
        names.update(dict.fromkeys(stores, parameters))
        initializers.append(_Initializer(inner, loads, stores, parameters))
    return initializers


@dataclass
class _Binding:
    """What becomes of new values of parameters; values are known by what they are called here.

    Attributes:
        parameters: their names, with commas between them.
        imports: the types that the only one is imported as; none if there are several.
        loads: ops that load what else is needed.
        ops: what is computed.
        operands: of each of these.
        stores: globals, and what is stored in them.
    """

    parameters: str
    imports: list[Any]
    loads: list[Any] = field(default_factory=list)
    ops: list[Any] = field(default_factory=list)
    operands: list[list[str]] = field(default_factory=list)
    stores: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        parameters: str,
        raw: Mapping[str, Any],
        kept: Collection[str],
        initializers: Sequence[_Initializer],
    ) -> _Binding:
        """Follow initializers, in order.

        Args:
            parameters: the names.
            raw: the globals that hold the only one.
            kept: those of them that somebody else reads.
            initializers: what depends on these parameters.
        """
        binding = cls(parameters, [op.attributes["type"] for op in raw.values()])
        held = {symbol: f"import {i}" for i, symbol in enumerate(raw)}
        binding.stores += [(symbol, value) for symbol, value in held.items() if symbol in kept]
        values: dict[Any, str] = {}
        for op in (op for initializer in initializers for op in initializer.ops):
            if op.name == "util.global.load":
                symbol = op.attributes["global"].value
                if symbol not in held:
                    held[symbol] = f"load {len(binding.loads)}"
                    binding.loads.append(op)
                values[op.results[0]] = held[symbol]
            elif op.name == "util.global.store":
                held[op.attributes["global"].value] = values[op.operands[0]]
                binding.stores.append((op.attributes["global"].value, values[op.operands[0]]))
            elif op.name != "util.return":
                number = len(binding.ops)
                binding.operands.append([values[operand] for operand in op.operands])
                values.update((r, f"op {number} {i}") for i, r in enumerate(op.results))
                binding.ops.append(op)
        return binding

    @cached_property
    def form(self) -> str:
        """All but the names of globals, as text."""
        lines = [f"import {kind}" for kind in self.imports]
        lines += [f"load {op.results[0].type}" for op in self.loads]
        for op, operands in zip(self.ops, self.operands, strict=True):
            kinds = [str(result.type) for result in op.results]
            attributes = [f"{name} = {op.attributes[name]}" for name in sorted(op.attributes)]
            inside = [self.parameters] if len(op.regions) else []  # equal to no other
            lines.append("; ".join([op.name, *operands, *attributes, *kinds, *inside]))
        return "\n".join([*lines, *(f"store {value}" for _, value in self.stores)])


def _add_function(number: int, members: Sequence[tuple[int, _Binding]]) -> None:
    """Write `@bind$number(view, which, wait, signal)` for bindings of one form.

    Args:
        number: of the function.
        members: the bindings, each with its place in the order in which they are to run.
    """
    from iree.compiler import ir

    bindings = [binding for _, binding in members]
    first, which_type = bindings[0], ir.IntegerType.get_signless(32)
    view_type, fence_type = ir.Type.parse("!hal.buffer_view"), ir.Type.parse("!hal.fence")
    kinds = [view_type, which_type, fence_type, fence_type]
    reflection = " ".join(f"{step}:{binding.parameters}" for step, binding in members)
    function = ir.Operation.create(
        "util.func",
        regions=1,
        attributes={
            "sym_name": ir.StringAttr.get(bind_function(number)),
            "sym_visibility": ir.StringAttr.get("public"),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get(kinds, [])),
            "iree.abi.stub": ir.UnitAttr.get(),
            "iree.reflection": ir.DictAttr.get({BOUND: ir.StringAttr.get(reflection)}),
        },
    )
    entry = function.regions[0].blocks.append(*kinds)
    view, which, wait, signal = entry.arguments
    values: dict[str, Any] = {}
    if first.loads:
        join = function.regions[0].blocks.append(*(op.results[0].type for op in first.loads))
        values.update((f"load {i}", value) for i, value in enumerate(join.arguments))

        def load(binding: _Binding) -> None:
            loaded = [op.clone().results[0] for op in binding.loads]
            ir.Operation.create("cf.br", operands=loaded, successors=[join])

        _switch(function, entry, which, [partial(load, binding) for binding in bindings])
        entry = join
    with ir.InsertionPoint(entry):
        for i, kind in enumerate(first.imports):
            values[f"import {i}"] = _import(view, wait, kind)
        for i, (op, operands) in enumerate(zip(first.ops, first.operands, strict=True)):
            copy = op.clone()
            for k, operand in enumerate(operands):
                copy.operands[k] = values[operand]
            values.update((f"op {i} {k}", result) for k, result in enumerate(copy.results))
        made = [values[value] for value in dict.fromkeys(value for _, value in first.stores)]
        if made:
            kinds = [value.type for value in made]
            ir.Operation.create("hal.tensor.barrier", results=kinds, operands=[*made, signal])
        else:  # the result does not depend on the parameter
            ir.Operation.create("hal.fence.signal", operands=[signal])

    def store(binding: _Binding) -> None:
        for symbol, value in binding.stores:
            target = {"global": ir.FlatSymbolRefAttr.get(symbol)}
            ir.Operation.create("util.global.store", operands=[values[value]], attributes=target)
        ir.Operation.create("util.return")

    _switch(function, entry, which, [partial(store, binding) for binding in bindings])


def _switch(function: Any, block: Any, which: Any, branches: Sequence[Callable[[], None]]) -> None:
    """End a block with a choice among branches, each in a block of its own."""
    from iree.compiler import ir

    if len(branches) == 1:
        with ir.InsertionPoint(block):
            branches[0]()
        return
    blocks = [function.regions[0].blocks.append() for _ in branches]
    for place, branch in zip(blocks, branches, strict=True):
        with ir.InsertionPoint(place):
            branch()
    cases = ", ".join(str(i) for i in range(1, len(branches)))
    none_each = [0] * (len(branches) - 1)
    with ir.InsertionPoint(block):
        ir.Operation.create(
            "cf.switch",
            operands=[which],
            attributes={
                "case_values": ir.Attribute.parse(
                    f"dense<[{cases}]> : vector<{len(none_each)}xi32>"
                ),
                "case_operand_segments": ir.DenseI32ArrayAttr.get(none_each),
                "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 0, 0]),
            },
            successors=blocks,
        )


def _import(view: Any, wait: Any, kind: Any) -> Any:
    """Import what a view holds, whatever its shape: that of a global has lost sizes of 1."""
    from iree.compiler import ir

    buffer_type = ir.Type.parse("!hal.buffer")
    buffer = ir.Operation.create("hal.buffer_view.buffer", results=[buffer_type], operands=[view])
    segments = ir.DenseI32ArrayAttr.get([1, 0, 1, 0])  # source, dimensions, fence, affinity
    return ir.Operation.create(
        "hal.tensor.import",
        results=[kind.value],
        operands=[buffer.result, wait],
        attributes={"target_encoding": kind, "operandSegmentSizes": segments},
    ).result


def _read_by_functions(ops: Sequence[Any]) -> set[str]:
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


def _symbol(op: Any) -> str:
    is_global = op.operation.name == "util.global"
    return str(op.attributes["sym_name"].value) if is_global else ""


def _parameter_of(op: Any) -> str | None:
    if not _symbol(op) or "initial_value" not in op.attributes:
        return None
    found = _PARAMETER.search(str(op.attributes["initial_value"]))
    return found["name"] if found else None

"""Functions that bind a changed parameter: what is made of it is written where it lies."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lowering.abi import PARAMETER_SCOPE, bind_function
from lowering.stages.ir.symbols import global_of, inside, symbol_of, walk

_PARAMETER = re.compile(rf'#flow\.parameter\.named<"{PARAMETER_SCOPE}"::"(?P<name>[^"]+)">')
PROBE = "probe$made"  # a function


@dataclass(frozen=True)
class Bound:
    """What is bound in a module.

    Attributes:
        held: the names of parameters that functions use as they are, by the globals that hold them.
        made: what functions use of what is made of parameters, as the probe exports it.
        functions: the number of the bind function of each.
        others: the names of parameters of which something is made in another way.
    """

    held: Mapping[str, str]
    made: Sequence[Derived]
    functions: Sequence[int]
    others: Collection[str]


def add_bind_functions(module: Any) -> Bound | None:
    """Add a function for each form of what is made of parameters, and a probe of where that lies.

    IREE has hoisted what depends on parameters alone (packing, transposing) into initializers.
    What makes one global is written again as a function: of the parameters, and of the memory that
    the result is to lie in. Nothing else changes: IREE lays all that is made at load side by side
    and may count on where it is. (Globals that may be stored again would be of four parts each:
    ResNet-50 has 371, which took half of its compile.)

    A function costs 10 to 40 ms of a compile, and a model has hundreds of parameters but few forms
    of them: what differs in nothing but the names of globals is one function.

    Before: util.initializer { %w = util.global.load immutable @p0
                               %0 = flow.tensor.encode %w; util.global.store %0, @packed0 }
            the same of @p1 and @packed1
    After:  the same, and
            util.func public @bind$0(%view, %memory, %offset, %size, %wait, %signal) {
                %w = hal.tensor.import wait(%wait) => %view
                %0 = flow.tensor.encode %w
                %1 = hal.tensor.alias wait(%wait) => %0 to (a span of %memory)
                hal.tensor.barrier join(%1) => %signal }
            util.func public @probe$made() { exports @packed0 and @packed1 }

    Args:
        module: one in flow, as `linalg-to-flow` leaves it.

    Returns:
        What `lowering.stages.code.give_access` needs; None for a module whose initializers have
        control flow: it is loaded again instead.
    Source: initializers come from IREE's `iree-util-hoist-into-globals`.
    """
    from iree.compiler import ir

    initializers = inside(module, "util.initializer")
    if any(len(op.regions[0].blocks) != 1 for op in initializers):
        return None
    held = {symbol_of(op): name for op in inside(module, "util.global") if (name := _named(op))}
    stores = [op for i in initializers for op in inside(i, "util.global.store")]
    stored = {global_of(op): op.operands[0] for op in stores}
    read = _read_by_functions(module)
    found = [Derived.of(symbol, stored, held) for symbol in stored if symbol in read]
    made = [one for one in found if one.parameters and one.is_plain]
    others = [one.parameters for one in found if not one.is_plain]
    forms: dict[str, list[Derived]] = {}
    for one in made:
        forms.setdefault(one.form, []).append(one)
    numbers = {form: number for number, form in enumerate(forms)}
    with ir.Location.unknown(), ir.InsertionPoint(module.body):
        for form, number in numbers.items():
            _add_function(number, forms[form][0])
        _add_probe(made)
    return Bound(
        {symbol: name for symbol, name in held.items() if symbol in read},
        made,
        [numbers[one.form] for one in made],
        {*itertools.chain.from_iterable(others)},
    )


@dataclass
class Derived:
    """What a global holds, and how it is made of parameters.

    Attributes:
        symbol: the global.
        value: what is stored in it.
        imports: the parameters' names and the types that they are imported as, in order.
        ops: what computes the value of them, in order; loads of parameters are not among them.
        values: what the ops read -> what is called so in the form.
    """

    symbol: str
    value: Any
    imports: dict[str, Any] = field(default_factory=dict)
    ops: list[Any] = field(default_factory=list)
    values: dict[Any, str] = field(default_factory=dict)

    @classmethod
    def of(cls, symbol: str, stored: Mapping[str, Any], held: Mapping[str, str]) -> Derived:
        """Follow a value back through initializers to parameters.

        Args:
            symbol: the global.
            stored: what initializers store, by global.
            held: the parameters' names, by the globals that hold them as they are.
        """
        one = cls(symbol, stored[symbol])
        one._follow(one.value, stored, held)
        return one

    def _follow(self, value: Any, stored: Mapping[str, Any], held: Mapping[str, str]) -> None:
        """Put what a value is computed by behind what that needs."""
        if value in self.values:
            return
        op = value.owner
        symbol = global_of(op) if op.name == "util.global.load" else ""
        if symbol in held:
            kind = str(value.type)
            self.imports.setdefault(f"{held[symbol]} {kind}", value.type)
            self.values[value] = f"import {[*self.imports].index(f'{held[symbol]} {kind}')}"
        elif symbol in stored:
            self._follow(stored[symbol], stored, held)
            self.values[value] = self.values[stored[symbol]]
        else:
            for operand in op.operands:
                self._follow(operand, stored, held)
            self.values.update((r, f"op {len(self.ops)} {i}") for i, r in enumerate(op.results))
            self.ops.append(op)

    @property
    def is_plain(self) -> bool:
        """Whether it is a tensor of known sizes, made by ops without regions."""
        is_tensor = str(self.value.type).startswith("tensor<") and "?" not in str(self.value.type)
        return is_tensor and not any(len(op.regions) for op in self.ops)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of the imports."""
        return tuple(key.partition(" ")[0] for key in self.imports)

    @cached_property
    def form(self) -> str:
        """All but the names of parameters and of the global, as text."""
        lines = [f"import {kind}" for kind in self.imports.values()]
        for op in self.ops:
            operands = [self.values[operand] for operand in op.operands]
            kinds = [str(result.type) for result in op.results]
            attributes = [f"{name} = {op.attributes[name]}" for name in sorted(op.attributes)]
            lines.append("; ".join([op.name, *operands, *attributes, *kinds]))
        return "\n".join([*lines, self.values[self.value]])


def _add_function(number: int, made: Derived) -> None:
    """Write `@bind$number(views, memory, offset, size, wait, signal)` for all of a form."""
    from iree.compiler import ir

    view, buffer, fence = map(ir.Type.parse, ("!hal.buffer_view", "!hal.buffer", "!hal.fence"))
    number_type = ir.IntegerType.get_signless(64)
    kinds = [*[view] * len(made.imports), buffer, number_type, number_type, fence, fence]
    function = _function(bind_function(number), kinds, [])
    entry = function.regions[0].blocks.append(*kinds)
    *views, memory, offset, size, wait, signal = entry.arguments
    with ir.InsertionPoint(entry):
        imports = [
            _import(one, wait, kind) for one, kind in zip(views, made.imports.values(), strict=True)
        ]
        values = {f"import {i}": value for i, value in enumerate(imports)}
        for i, op in enumerate(made.ops):
            copy = op.clone()
            for k, operand in enumerate(op.operands):
                copy.operands[k] = values[made.values[operand]]
            values.update((f"op {i} {k}", result) for k, result in enumerate(copy.results))
        value = values[made.values[made.value]]
        index = [ir.IndexType.get()]
        part = [ir.Operation.create("arith.index_cast", index, [n]).result for n in (offset, size)]
        span = ir.Operation.create("hal.buffer.subspan", [buffer], [memory, *part]).result
        aliased = ir.Operation.create(
            "hal.tensor.alias",
            results=[value.type],
            operands=[value, span, wait],
            attributes={"operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 0, 1, 1])},
        ).result
        ir.Operation.create("hal.tensor.barrier", [value.type], [aliased, signal])
        ir.Operation.create("util.return")


def _add_probe(made: Sequence[Derived]) -> None:
    """Write a function that exports globals: what becomes of it says where these lie."""
    from iree.compiler import ir

    view = ir.Type.parse("!hal.buffer_view")
    function = _function(PROBE, [], [view] * len(made))
    with ir.InsertionPoint(function.regions[0].blocks.append()):
        exported, unit = [], ir.UnitAttr.get()
        for one in made:
            kind = one.value.type
            source = {"global": ir.FlatSymbolRefAttr.get(one.symbol), "is_immutable": unit}
            value = ir.Operation.create("util.global.load", [kind], [], source).result
            encoding = {"source_encoding": ir.TypeAttr.get(kind)}
            export = ir.Operation.create("hal.tensor.export", [view], [value], encoding)
            exported.append(export.result)
        ir.Operation.create("util.return", operands=exported)


def _function(name: str, kinds: Sequence[Any], results: Sequence[Any]) -> Any:
    from iree.compiler import ir

    return ir.Operation.create(
        "util.func",
        regions=1,
        attributes={
            "sym_name": ir.StringAttr.get(name),
            "sym_visibility": ir.StringAttr.get("public"),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get(kinds, results)),
            "iree.abi.stub": ir.UnitAttr.get(),
        },
    )


def _import(view: Any, wait: Any, kind: Any) -> Any:
    """Import what a view holds, whatever its shape: that of a global has lost sizes of 1."""
    from iree.compiler import ir

    buffer_type = ir.Type.parse("!hal.buffer")
    buffer = ir.Operation.create("hal.buffer_view.buffer", results=[buffer_type], operands=[view])
    segments = ir.DenseI32ArrayAttr.get([1, 0, 1, 0])  # source, dimensions, fence, affinity
    return ir.Operation.create(
        "hal.tensor.import",
        results=[kind],
        operands=[buffer.result, wait],
        attributes={"target_encoding": ir.TypeAttr.get(kind), "operandSegmentSizes": segments},
    ).result


def _read_by_functions(module: Any) -> set[str]:
    """Give the globals that are loaded elsewhere than in initializers."""
    functions = inside(module, "util.func")
    return {global_of(op) for f in functions for op in walk(f) if op.name == "util.global.load"}


def _named(op: Any) -> str | None:
    """Return the name of the parameter that a global holds as it is."""
    if "initial_value" not in op.attributes:
        return None
    found = _PARAMETER.search(str(op.attributes["initial_value"]))
    return found["name"] if found else None

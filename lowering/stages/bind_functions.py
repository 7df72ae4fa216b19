"""Functions that bind a changed parameter: what is made of it is written where it lies."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lowering.abi import MADE, PARAMETER_SCOPE, REBINDING, SWAP, Made, Rebinding, bind_function
from lowering.stages.dispatch_work import walk
from lowering.stages.symbols import constant_of, inside, maker_of, symbol_of
from lowering.stages.templates import put_functions

_PARAMETER = re.compile(rf'#flow\.parameter\.named<"{PARAMETER_SCOPE}"::"(?P<name>[^"]+)">')
_PROBE = "probe$made"
_CONSTANT = "!stream.resource<constant>"
# What makes the memory that a global holds, and whether that is the module's own.
_MAKERS = {
    "stream.resource.alloc": True,
    "stream.resource.alloca": True,
    "stream.cmd.parameter.load": False,
}
# What hands memory on, or part of it.
_SAME = ("stream.resource.subview", "stream.tensor.export", "stream.timepoint.await")
_Held = str  # the device that it is on, as the clause of an op


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
        What `replace_probe` needs; None for a module whose initializers have control flow:
        it is loaded again instead.
    Source: initializers come from IREE's `iree-util-hoist-into-globals`.
    """
    from iree.compiler import ir

    initializers = inside(module, "util.initializer")
    if any(len(op.regions[0].blocks) != 1 for op in initializers):
        return None
    held = {symbol_of(op): name for op in inside(module, "util.global") if (name := _named(op))}
    stores = [op for i in initializers for op in inside(i, "util.global.store")]
    stored = {_global(op): op.operands[0] for op in stores}
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


def replace_probe(module: Any, bound: Bound, parameters: Iterable[str]) -> None:
    """Put in the place of the probe what gives access to the memory that its results lie in.

    Before: util.func public @probe$made() -> (%0, %1: !hal.buffer_view) {
                %memory = util.global.load immutable @packed; ... copies of two parts of it }
    After:  util.func public @made$memory() -> !hal.buffer { util.global.load @packed }
            util.func public @swap$memory(%memory: !hal.buffer, %which: i32) {
                util.global.store %memory, @p0, for 0 }, for parameters that are used as they are

    What can be bound so is reflected by the first (`Rebinding`): no parameter that is used in a
    place that is not known, or may be shared with a parameter's own memory.

    Args:
        module: as IREE's phase `executable-targets` leaves it: the host's part is in stream.
        bound: as `add_bind_functions` returned it.
        parameters: the names of all. Of some, nothing is used.
    """
    from iree.compiler import ir

    (probe,) = (f for f in inside(module, "util.func") if symbol_of(f) == _PROBE)
    places = _places(probe)
    probe.operation.erase()
    owned, given = _by_maker(module)
    memories = list(dict.fromkeys(p.memory for p in places if p and p.memory in owned))
    made, lost = [], set(bound.others)
    for one, number, place in zip(bound.made, bound.functions, places, strict=True):
        if place and place.memory in owned:
            memory = memories.index(place.memory)
            made.append(Made(number, memory, place.offset, place.nbytes, one.parameters))
        else:
            lost.update(one.parameters)
    swapped = {symbol: name for symbol, name in bound.held.items() if symbol in given}
    lost.update(name for symbol, name in bound.held.items() if symbol not in swapped)
    rebinding = Rebinding(frozenset(parameters) - lost, tuple(made), tuple(swapped.values()))
    used = {symbol: (owned | given)[symbol] for symbol in (*memories, *swapped)}
    text = "\n".join(f"util.global private mutable @{symbol} : {_CONSTANT}" for symbol in used)
    text += _made_memory({symbol: used[symbol] for symbol in memories}, rebinding)
    text += _swap_memory({symbol: used[symbol] for symbol in swapped})
    with ir.Location.unknown():
        put_functions(module, text, used)
    _make_mutable(module, swapped.keys())


def allow_swaps(module: Any) -> None:
    """Let any memory be swapped in: IREE asserts that it was allocated to be constant.

    The runtime gives what it has put there for the parameter, of the same length.

    Args:
        module: as IREE's phase `hal` leaves it.
    """
    functions = [f for f in inside(module, "util.func") if symbol_of(f) == SWAP]
    for op in [op for f in functions for op in walk(f) if op.name == "hal.buffer.assert"]:
        op.erase()


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
    def of(cls, symbol: str, made: Mapping[str, Any], held: Mapping[str, str]) -> Derived:
        """Follow a value back through initializers to parameters.

        Args:
            symbol: the global.
            made: what initializers store, by global.
            held: the parameters' names, by the globals that hold them as they are.
        """
        one = cls(symbol, made[symbol])
        one._follow(one.value, made, held)
        return one

    def _follow(self, value: Any, made: Mapping[str, Any], held: Mapping[str, str]) -> None:
        """Put what a value is computed by behind what that needs."""
        if value in self.values:
            return
        op = value.owner
        symbol = _global(op) if op.name == "util.global.load" else ""
        if symbol in held:
            kind = str(value.type)
            self.imports.setdefault(f"{held[symbol]} {kind}", value.type)
            self.values[value] = f"import {[*self.imports].index(f'{held[symbol]} {kind}')}"
        elif symbol in made:
            self._follow(made[symbol], made, held)
            self.values[value] = self.values[made[symbol]]
        else:
            for operand in op.operands:
                self._follow(operand, made, held)
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
    function = _function(_PROBE, [], [view] * len(made))
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
    return {_global(op) for f in functions for op in walk(f) if op.name == "util.global.load"}


def _global(op: Any) -> str:
    return str(op.attributes["global"].value)


def _named(op: Any) -> str | None:
    """Return the name of the parameter that a global holds as it is."""
    if "initial_value" not in op.attributes:
        return None
    found = _PARAMETER.search(str(op.attributes["initial_value"]))
    return found["name"] if found else None


@dataclass(frozen=True)
class _Place:
    """Where something lies: a global that holds memory, the offset in it, and the length."""

    memory: str
    offset: int
    nbytes: int


def _places(probe: Any) -> list[_Place | None]:
    """Say of which part of which global each result of the probe is a copy; None: of none."""
    block = probe.regions[0].blocks[0]
    copies: dict[tuple[Any, int | None], _Place] = {}
    for execute in (op for op in block.operations if op.operation.name == "stream.cmd.execute"):
        resources = [o for o in execute.operands if str(o.type).startswith("!stream.resource")]
        held = dict(zip(execute.regions[0].blocks[0].arguments, resources, strict=True))
        for op in (op for op in walk(execute) if op.name == "stream.cmd.copy"):
            source, _, offset, target, _, target_offset, size = op.operands
            start, nbytes = constant_of(offset), constant_of(size)
            loaded = held[source]
            if maker_of(loaded) == "util.global.load" and start is not None and nbytes is not None:
                place = _Place(_global(loaded.owner), start, nbytes)
                copies[held[target], constant_of(target_offset)] = place
    *_, end = block.operations
    return [copies.get(_part(value)) for value in end.operands]


def _part(value: Any) -> tuple[Any, int | None]:
    """Return the memory that a value is part of, and where in that it begins."""
    offset: int | None = 0
    while maker_of(value) in _SAME:
        op = value.owner
        if op.name == "stream.resource.subview":
            inner = constant_of(op.operands[2])
            offset = None if offset is None or inner is None else offset + inner
        value = op.operands[[*op.results].index(value)]
    return value, offset


def _by_maker(module: Any) -> tuple[dict[str, _Held], dict[str, _Held]]:
    """Return the globals that hold memory that the module allocates, and a parameter's own.

    With each comes the device that it is on.
    """
    owned, given = dict[str, _Held](), dict[str, _Held]()
    for initializer in inside(module, "util.initializer"):
        for op in (op for op in walk(initializer) if op.name == "util.global.store"):
            value, offset = _part(op.operands[0])
            if offset == 0 and maker_of(value) in _MAKERS:
                held = owned if _MAKERS[maker_of(value)] else given
                held[_global(op)] = _device_of(value.owner)
    return owned, given


def _made_memory(held: Mapping[str, _Held], rebinding: Rebinding) -> str:
    lines = []
    for i, (symbol, device) in enumerate(held.items()):
        lines += [
            f"%held{i} = util.global.load @{symbol} : {_CONSTANT}",
            f"%size{i} = stream.resource.size %held{i} : {_CONSTANT}",
            f"%memory{i} = stream.tensor.export {device} %held{i} : "
            f"tensor<?xi8>{{%size{i}}} in {_CONSTANT}{{%size{i}}} -> !hal.buffer",
        ]
    kinds = ", ".join(["!hal.buffer"] * len(held))
    values = ", ".join(f"%memory{i}" for i in range(len(held)))
    body = "\n  ".join([*lines, f"util.return {values} : {kinds}" if held else "util.return"])
    return f"""
util.func public @{MADE}() -> ({kinds}) attributes {{iree.abi.stub, iree.reflection =
    {{{REBINDING} = {json.dumps(rebinding.write())}}}}} {{
  {body}
}}"""


def _swap_memory(held: Mapping[str, _Held]) -> str:
    if not held:
        return ""
    cases = ", ".join(["default: ^b0", *(f"{i}: ^b{i}" for i in range(1, len(held)))])
    blocks = "\n".join(
        f"^b{i}:\n  util.global.store %new, @{symbol} : {_CONSTANT}\n  util.return"
        for i, symbol in enumerate(held)
    )
    device = next(iter(held.values()))
    return f"""
util.func public @{SWAP}(%memory: !hal.buffer, %which: i32) attributes {{iree.abi.stub}} {{
  %size = hal.buffer.length<%memory : !hal.buffer> : index
  %new = stream.tensor.import {device} %memory : !hal.buffer
      -> tensor<?xi8>{{%size}} in {_CONSTANT}{{%size}}
  cf.switch %which : i32, [{cases}]
{blocks}
}}"""


def _device_of(op: Any) -> _Held:
    return f"on({op.attributes['affinity']})" if "affinity" in op.attributes else ""


def _make_mutable(module: Any, symbols: Collection[str]) -> None:
    from iree.compiler import ir

    for op in inside(module, "util.global"):
        if symbol_of(op) in symbols:
            op.attributes["is_mutable"] = ir.UnitAttr.get()
    for part in (*inside(module, "util.func"), *inside(module, "util.initializer")):
        for op in walk(part):
            if op.name == "util.global.load" and _global(op) in symbols:
                _discard(op.attributes, "is_immutable")


def _discard(attributes: Any, name: str) -> None:
    if name in attributes:
        del attributes[name]

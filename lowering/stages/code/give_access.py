"""Access to the memory that parameters, and what is made of them, lie in: to bind them anew."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lowering.abi import MADE, REBINDING, SWAP, Made, Rebinding
from lowering.stages.flow.bind_functions import PROBE, Bound
from lowering.stages.ir.symbols import constant_of, global_of, inside, maker_of, symbol_of, walk
from lowering.stages.ir.templates import put_functions

_CONSTANT = "!stream.resource<constant>"
# What makes the memory that a global holds, and whether that is the module's own.
_MAKERS = {
    "stream.resource.alloc": True,
    "stream.resource.alloca": True,
    "stream.cmd.parameter.load": False,
}
# What hands memory on, or part of it.
_SAME = ("stream.resource.subview", "stream.tensor.export", "stream.timepoint.await")
_Device = str  # the clause of an op that says where it runs


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

    (probe,) = (f for f in inside(module, "util.func") if symbol_of(f) == PROBE)
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
        captured = dict(zip(execute.regions[0].blocks[0].arguments, resources, strict=True))
        for op in (op for op in walk(execute) if op.name == "stream.cmd.copy"):
            source, _, offset, target, _, target_offset, size = op.operands
            start, nbytes = constant_of(offset), constant_of(size)
            loaded = captured[source]
            if maker_of(loaded) == "util.global.load" and start is not None and nbytes is not None:
                place = _Place(global_of(loaded.owner), start, nbytes)
                copies[captured[target], constant_of(target_offset)] = place
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


def _by_maker(module: Any) -> tuple[dict[str, _Device], dict[str, _Device]]:
    """Return the globals that hold memory that the module allocates, and a parameter's own.

    With each comes the device that it is on.
    """
    owned, given = dict[str, _Device](), dict[str, _Device]()
    for initializer in inside(module, "util.initializer"):
        for op in (op for op in walk(initializer) if op.name == "util.global.store"):
            value, offset = _part(op.operands[0])
            if offset == 0 and maker_of(value) in _MAKERS:
                found = owned if _MAKERS[maker_of(value)] else given
                found[global_of(op)] = _device_of(value.owner)
    return owned, given


def _made_memory(devices: Mapping[str, _Device], rebinding: Rebinding) -> str:
    lines = []
    for i, (symbol, device) in enumerate(devices.items()):
        lines += [
            f"%held{i} = util.global.load @{symbol} : {_CONSTANT}",
            f"%size{i} = stream.resource.size %held{i} : {_CONSTANT}",
            f"%memory{i} = stream.tensor.export {device} %held{i} : "
            f"tensor<?xi8>{{%size{i}}} in {_CONSTANT}{{%size{i}}} -> !hal.buffer",
        ]
    kinds = ", ".join(["!hal.buffer"] * len(devices))
    values = ", ".join(f"%memory{i}" for i in range(len(devices)))
    body = "\n  ".join([*lines, f"util.return {values} : {kinds}" if devices else "util.return"])
    return f"""
util.func public @{MADE}() -> ({kinds}) attributes {{iree.abi.stub, iree.reflection =
    {{{REBINDING} = {json.dumps(rebinding.write())}}}}} {{
  {body}
}}"""


def _swap_memory(devices: Mapping[str, _Device]) -> str:
    if not devices:
        return ""
    cases = ", ".join(["default: ^b0", *(f"{i}: ^b{i}" for i in range(1, len(devices)))])
    blocks = "\n".join(
        f"^b{i}:\n  util.global.store %new, @{symbol} : {_CONSTANT}\n  util.return"
        for i, symbol in enumerate(devices)
    )
    device = next(iter(devices.values()))
    return f"""
util.func public @{SWAP}(%memory: !hal.buffer, %which: i32) attributes {{iree.abi.stub}} {{
  %size = hal.buffer.length<%memory : !hal.buffer> : index
  %new = stream.tensor.import {device} %memory : !hal.buffer
      -> tensor<?xi8>{{%size}} in {_CONSTANT}{{%size}}
  cf.switch %which : i32, [{cases}]
{blocks}
}}"""


def _device_of(op: Any) -> _Device:
    return f"on({op.attributes['affinity']})" if "affinity" in op.attributes else ""


def _make_mutable(module: Any, symbols: Collection[str]) -> None:
    from iree.compiler import ir

    for op in inside(module, "util.global"):
        if symbol_of(op) in symbols:
            op.attributes["is_mutable"] = ir.UnitAttr.get()
    for part in (*inside(module, "util.func"), *inside(module, "util.initializer")):
        for op in walk(part):
            if op.name == "util.global.load" and global_of(op) in symbols:
                _discard(op.attributes, "is_immutable")


def _discard(attributes: Any, name: str) -> None:
    if name in attributes:
        del attributes[name]

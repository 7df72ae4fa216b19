"""Slices of parameters: read where they are, not kept in globals of their own."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.device_programs import RESHAPE
from lowering.stages.ir.symbols import global_of, inside, ops_of, symbol_of, walk

_LOAD, _STORE = "util.global.load", "util.global.store"
_VIEWS = frozenset({_LOAD, "arith.constant", RESHAPE, "flow.tensor.slice"})


def read_in_place(module: Any) -> None:
    """Write what does no more than slice and reshape parameters where it is read.

    IREE hoists such code into initializers as it does any other. Nothing is gained by that: a
    device program reads a part of a tensor in place. And a global that holds a part of a
    parameter's own memory cannot be bound anew (`lowering.stages.code.give_access`).

    Before: util.global private @hoisted : tensor<64xf32>
            util.initializer { %0 = flow.tensor.slice of a load of @p0
                               util.global.store %0, @hoisted }
            util.func @main { %1 = util.global.load @hoisted; ... %1 ... }
    After:  util.func @main { %0 = flow.tensor.slice of a load of @p0; ... %0 ... }

    Args:
        module: one in flow, with dispatches formed.
    """
    loads: dict[str, list[Any]] = {}
    for op in (op for op in walk(module) if op.name == _LOAD):
        loads.setdefault(global_of(op), []).append(op)
    held = {symbol_of(op): op for op in inside(module, "util.global")}
    for initializer in inside(module, "util.initializer"):
        if len(initializer.regions[0].blocks) != 1:
            continue
        *views, store, _ = ops_of(initializer)
        names = {op.name for op in views}
        if store.name != _STORE or _LOAD not in names or not names <= _VIEWS:
            continue
        symbol = global_of(store)
        for load in loads.pop(symbol, []):
            load.results[0].replace_all_uses_with(_copy(views, store.operands[0], load, loads))
            load.erase()
        initializer.operation.erase()
        held[symbol].operation.erase()


def _copy(views: list[Any], wanted: Any, place: Any, loads: dict[str, list[Any]]) -> Any:
    """Write views again before an op; new loads are added to those that are known."""
    from iree.compiler import ir

    values: dict[Any, Any] = {}
    with ir.InsertionPoint(place):
        for op in views:
            copy = op.clone()
            for i, operand in enumerate(op.operands):
                copy.operands[i] = values[operand]
            values.update(zip(op.results, copy.results, strict=True))
            if copy.name == _LOAD:
                loads.setdefault(global_of(copy), []).append(copy)
    return values[wanted]

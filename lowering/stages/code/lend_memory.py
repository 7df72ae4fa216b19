"""Let a module be lent memory for what it computes on the way, in place of allocating it anew."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lowering.abi import LEND, LEND_RESULTS, LENT_BYTES, TAKE_BACK, TAKE_RESULTS_BACK, write_sizes
from lowering.stages.ir.symbols import constant_of, inside, maker_of, symbol_of
from lowering.stages.ir.templates import put_functions

_DECLARATION = "iree.abi.declaration"  # reflected by an entry point


@dataclass(frozen=True)
class _Kind:
    """A kind of memory that a call is lent.

    Attributes:
        resource: the type of what is allocated else.
        least_bytes: less is at hand wherever memory is allocated.
        lend: the function that lends it.
        take_back: the function that takes it back.
        stays: whether later calls use it, too.
    """

    resource: str
    least_bytes: int
    lend: str
    take_back: str
    stays: bool


_KINDS = (
    _Kind("!stream.resource<transient>", 1 << 20, LEND, TAKE_BACK, stays=True),
    _Kind("!stream.resource<external>", 4 << 20, LEND_RESULTS, TAKE_RESULTS_BACK, stays=False),
)
_FUNCTIONS = """
util.global private mutable @{lend}$buffer : !hal.buffer
util.func public @{lend}(%buffer: !hal.buffer)
    attributes {{iree.abi.stub, iree.reflection = {{{bytes} = {sizes}}}}} {{
  util.global.store %buffer, @{lend}$buffer : !hal.buffer
  util.return
}}
util.func public @{take_back}() attributes {{iree.abi.stub}} {{
  %none = util.null : !hal.buffer
  util.global.store %none, @{lend}$buffer : !hal.buffer
  util.return
}}
util.func private @{lend}$use(%begin: !stream.timepoint, %size: index)
    -> ({resource}, !stream.timepoint) {{
  %lent = util.global.load @{lend}$buffer : !hal.buffer
  %none = util.null : !hal.buffer{forget}
  %is_none = util.cmp.eq %lent, %none : !hal.buffer
  %memory, %ready = scf.if %is_none -> ({resource}, !stream.timepoint) {{
    %new, %allocated = stream.resource.alloca uninitialized on({affinity}) await(%begin)
        => {resource}{{%size}} => !stream.timepoint
    scf.yield %new, %allocated : {resource}, !stream.timepoint
  }} else {{
    %old = stream.tensor.import on({affinity}) %lent : !hal.buffer
        -> tensor<?xi8>{{%size}} in {resource}{{%size}}
    scf.yield %old, %begin : {resource}, !stream.timepoint
  }}
  util.return %memory, %ready : {resource}, !stream.timepoint
}}
"""
_FORGET = """
  util.global.store %none, @{lend}$buffer : !hal.buffer"""


def lend_memory(module: Any) -> None:
    """Let entry points use memory that they are lent, each for the most that it allocates.

    Memory that is allocated in each call is returned to the system if it is large, and what the
    system gives has to be zeroed, page by page: MobileNetV2 takes 61 ms a call at batch 8, and 33
    with memory that stays. A step of training returns all gradients: of BERT's, a fifth of the
    processor's time was the system's.

    Nothing is lent unless the runtime calls `lend$memory`, and then until it calls `take$back`;
    what `lend$results` lends is used by the next call. IREE's tools run the module as any other.
    What is lent is used by one call at a time, which the runtime sees to, and is as large as the
    functions that lend it reflect for the entry point.

    Before: %0, %1 = stream.resource.alloca await(%begin) => !stream.resource<transient>{%size}
    After:  %0, %1 = util.call @lend$memory$use(%begin, %size): lent memory, if there is any

    Args:
        module: as IREE's phase `executable-targets` leaves it: the host's part is in stream.
    """
    for kind in _KINDS:
        _lend(module, kind)


def _lend(module: Any, kind: _Kind) -> None:
    from iree.compiler import ir

    functions = inside(module, "util.func")
    found = {symbol_of(f): op for f in functions if (op := _largest(f, kind)) is not None}
    if not found:
        return
    some = next(iter(found.values()))
    text = _FUNCTIONS.format(
        lend=kind.lend,
        take_back=kind.take_back,
        bytes=LENT_BYTES,
        sizes=json.dumps(write_sizes({name: _bytes_of(op, kind) for name, op in found.items()})),
        resource=kind.resource,
        forget="" if kind.stays else _FORGET.format(lend=kind.lend),
        affinity=some.attributes["affinity"],
    )
    with ir.Location.unknown():
        put_functions(module, text)
    for op in found.values():
        _use_lent(op, kind)


def _largest(function: Any, kind: _Kind) -> Any:
    """Return what an entry point allocates the most by, if it is much; not in a branch."""
    (entry, *others) = function.regions[0].blocks
    if others or _DECLARATION not in function.attributes.get("iree.reflection", ()):
        return None  # a function that binds parameters, say, while calls are under way
    ops = [op for op in entry.operations if _bytes_of(op.operation, kind) >= kind.least_bytes]
    return max(ops, key=lambda op: _bytes_of(op, kind), default=None)


def _bytes_of(op: Any, kind: _Kind) -> int:
    """Return how much an op allocates of a kind; 0 if that varies."""
    if op.operation.name != "stream.resource.alloca" or str(op.results[0].type) != kind.resource:
        return 0
    size, *begin = op.operands
    return (constant_of(size) or 0) if any(map(_is_after_fence, begin)) else 0


def _is_after_fence(begin: Any) -> bool:
    """Say whether a timepoint waits for what the call does: only then may the memory be in use."""
    if maker_of(begin) == "stream.timepoint.join":
        return any(map(_is_after_fence, begin.owner.operands))
    return maker_of(begin) == "stream.timepoint.import"


def _use_lent(op: Any, kind: _Kind) -> None:
    from iree.compiler import ir

    size, begin = op.operands
    with ir.InsertionPoint(op), ir.Location.unknown():
        call = ir.Operation.create(
            "util.call",
            results=[result.type for result in op.results],
            operands=[begin, size],
            attributes={"callee": ir.FlatSymbolRefAttr.get(f"{kind.lend}$use")},
        )
    for old, new in zip(op.results, call.results, strict=True):
        old.replace_all_uses_with(new)
    op.operation.erase()

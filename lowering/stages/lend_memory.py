"""Let a module be lent memory for what it computes on the way, in place of allocating it anew."""

from __future__ import annotations

import json
from typing import Any

from lowering.abi import LEND, LENT_BYTES, TAKE_BACK, write_sizes
from lowering.stages.symbols import constant_of, inside, maker_of, symbol_of
from lowering.stages.templates import put_functions

_LEAST_BYTES = 1 << 20  # less is at hand wherever memory is allocated
_DECLARATION = "iree.abi.declaration"  # reflected by an entry point
_TRANSIENT = "!stream.resource<transient>"
_FUNCTIONS = """
util.global private mutable @lent$buffer : !hal.buffer
util.func public @{lend}(%buffer: !hal.buffer)
    attributes {{iree.abi.stub, iree.reflection = {{{bytes} = {sizes}}}}} {{
  util.global.store %buffer, @lent$buffer : !hal.buffer
  util.return
}}
util.func public @{take_back}() attributes {{iree.abi.stub}} {{
  %none = util.null : !hal.buffer
  util.global.store %none, @lent$buffer : !hal.buffer
  util.return
}}
util.func private @take$lent(%begin: !stream.timepoint, %size: index)
    -> (!stream.resource<transient>, !stream.timepoint) {{
  %lent = util.global.load @lent$buffer : !hal.buffer
  %none = util.null : !hal.buffer
  %is_none = util.cmp.eq %lent, %none : !hal.buffer
  %memory, %ready = scf.if %is_none -> (!stream.resource<transient>, !stream.timepoint) {{
    %new, %allocated = stream.resource.alloca uninitialized on({affinity}) await(%begin)
        => !stream.resource<transient>{{%size}} => !stream.timepoint
    scf.yield %new, %allocated : !stream.resource<transient>, !stream.timepoint
  }} else {{
    %old = stream.tensor.import on({affinity}) %lent : !hal.buffer
        -> tensor<?xi8>{{%size}} in !stream.resource<transient>{{%size}}
    scf.yield %old, %begin : !stream.resource<transient>, !stream.timepoint
  }}
  util.return %memory, %ready : !stream.resource<transient>, !stream.timepoint
}}
"""


def lend_memory(module: Any) -> None:
    """Let entry points use memory that they are lent, each for the most that it allocates.

    Memory that is allocated in each call is returned to the system if it is large, and what the
    system gives has to be zeroed, page by page: MobileNetV2 takes 61 ms a call at batch 8, and 33
    with memory that stays.

    Nothing is lent unless the runtime calls `lend$memory`, and then until it calls `take$back`:
    IREE's tools run the module as any other. What is lent is used by one call at a time, which the
    runtime sees to, and is as large as `lend$memory` reflects for the entry point.

    Before: %0, %1 = stream.resource.alloca await(%begin) => !stream.resource<transient>{%size}
    After:  %0, %1 = util.call @take$lent(%begin, %size): lent memory, if there is any

    Args:
        module: as IREE's phase `executable-targets` leaves it: the host's part is in stream.
    """
    from iree.compiler import ir

    functions = inside(module, "util.func")
    found = {symbol_of(f): op for f in functions if (op := _largest(f)) is not None}
    if not found:
        return
    some = next(iter(found.values()))
    text = _FUNCTIONS.format(
        lend=LEND,
        take_back=TAKE_BACK,
        bytes=LENT_BYTES,
        sizes=json.dumps(write_sizes({name: _bytes_of(op) for name, op in found.items()})),
        affinity=some.attributes["affinity"],
    )
    with ir.Location.unknown():
        put_functions(module, text)
    for op in found.values():
        _take_lent(op)


def _largest(function: Any) -> Any:
    """Return what an entry point allocates the most by, if it is much; not in a branch."""
    (entry, *others) = function.regions[0].blocks
    if others or _DECLARATION not in function.attributes.get("iree.reflection", ()):
        return None  # a function that binds parameters, say, while calls are under way
    allocations = [op for op in entry.operations if _bytes_of(op.operation) >= _LEAST_BYTES]
    return max(allocations, key=_bytes_of, default=None)


def _bytes_of(op: Any) -> int:
    """Return how much an op allocates for what a call computes on the way; 0 if that varies."""
    if op.operation.name != "stream.resource.alloca" or str(op.results[0].type) != _TRANSIENT:
        return 0
    size, *begin = op.operands
    return (constant_of(size) or 0) if any(map(_is_after_fence, begin)) else 0


def _is_after_fence(begin: Any) -> bool:
    """Say whether a timepoint waits for what the call does: only then may the memory be in use."""
    if maker_of(begin) == "stream.timepoint.join":
        return any(map(_is_after_fence, begin.owner.operands))
    return maker_of(begin) == "stream.timepoint.import"


def _take_lent(op: Any) -> None:
    from iree.compiler import ir

    size, begin = op.operands
    with ir.InsertionPoint(op), ir.Location.unknown():
        call = ir.Operation.create(
            "util.call",
            results=[result.type for result in op.results],
            operands=[begin, size],
            attributes={"callee": ir.FlatSymbolRefAttr.get("take$lent")},
        )
    for old, new in zip(op.results, call.results, strict=True):
        old.replace_all_uses_with(new)
    op.operation.erase()

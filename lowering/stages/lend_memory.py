"""Let a module be lent memory for what it computes on the way, in place of allocating it anew."""

from __future__ import annotations

from typing import Any

from lowering.abi import LEND, LENT_BYTES, TAKE_BACK
from lowering.stages.symbols import constant_of_index, inside
from lowering.stages.templates import put_functions

_LEAST_BYTES = 1 << 20  # less is at hand wherever memory is allocated
_DECLARATION = "iree.abi.declaration"  # reflected by an entry point
_TRANSIENT = "!stream.resource<transient>"
_FUNCTIONS = """
util.global private mutable @lent : !hal.buffer
util.func public @{lend}(%buffer: !hal.buffer)
    attributes {{iree.abi.stub, iree.reflection = {{{bytes} = "{most}"}}}} {{
  util.global.store %buffer, @lent : !hal.buffer
  util.return
}}
util.func public @{take_back}() attributes {{iree.abi.stub}} {{
  %none = util.null : !hal.buffer
  util.global.store %none, @lent : !hal.buffer
  util.return
}}
util.func private @take_lent(%begin: !stream.timepoint, %size: index)
    -> (!stream.resource<transient>, !stream.timepoint) {{
  %lent = util.global.load @lent : !hal.buffer
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

    Nothing is lent unless the runtime calls `lend$`, and then until it calls `take$back`: IREE's
    tools run the module as any other. What is lent is used by one call at a time, which the runtime
    sees to, and is as large as what `lend$` reflects.

    Before: %0, %1 = stream.resource.alloca await(%begin) => !stream.resource<transient>{%size}
    After:  %0, %1 = util.call @take_lent(%begin, %size)

    Args:
        module: as IREE's phase `executable-targets` leaves it: the host's part is in stream.
    """
    from iree.compiler import ir

    found = [op for function in inside(module, "util.func") if (op := _largest(function))]
    if not found:
        return
    text = _FUNCTIONS.format(
        lend=LEND,
        take_back=TAKE_BACK,
        bytes=LENT_BYTES,
        most=max(map(_bytes_of, found)),
        affinity=found[0].attributes["affinity"],
    )
    with ir.Location.unknown():
        put_functions(module, text)
    for op in found:
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
    has_begin = len(op.operands) == 2
    return (constant_of_index(op.operands[0]) or 0) if has_begin else 0


def _take_lent(op: Any) -> None:
    from iree.compiler import ir

    size, begin = op.operands
    with ir.InsertionPoint(op), ir.Location.unknown():
        call = ir.Operation.create(
            "util.call",
            results=[result.type for result in op.results],
            operands=[begin, size],
            attributes={"callee": ir.FlatSymbolRefAttr.get("take_lent")},
        )
    for old, new in zip(op.results, call.results, strict=True):
        old.replace_all_uses_with(new)
    op.operation.erase()

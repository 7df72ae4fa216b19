"""Have the CPU's matrix unit multiply floats, each of them as a sum of three bfloat16."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from typing import Any

from lowering.stages.code.branches import branch, go_on_elsewhere
from lowering.stages.code.product_loops import Loop, loop_at
from lowering.stages.code.tile_functions import (
    LENT,
    PARTS_BYTES,
    STATE_BYTES,
    library,
    multiply_function,
)
from lowering.stages.ir.matrix_unit import COLUMNS, DEPTH, DEPTHS, LEAST_HEIGHT, ROWS, has_tiles
from lowering.stages.ir.symbols import inside, symbol_of, variants
from lowering.stages.ir.templates import put, put_functions

_LOCAL_MEMORY = "workgroup_local_memory"
_ALIGNMENT = 64


def multiply_tiles(module: Any, features: Collection[str]) -> None:
    """Compute blocks of products by tiles, as precisely as in float32.

    A float32 is the sum of three bfloat16, of 8 bits each: x = x0 + x1 + x2. Of the nine products
    of such parts, six are as precise as one in float32. The unit makes the six in 0.4 of the time
    that vectors take for the one; meanwhile, vectors take the next numbers apart.

    The loop that was there stays, for what the parts do not hold (infinities, very large and very
    small numbers), where the system does not lend the unit to the process, and for what is less
    than a step of the unit.

    A convolution (`lowering.stages.code.block_convolutions`) adds up the same in three loops; the
    unit does all of them at once, where they read the panel without gaps.

    Before: for k in 0..K: sums[r] += %x[r, k] * %panel[k]                       for each row r
    After:  if multiply(&%x[0, 0], &%panel[0], &%block): sums[r] += %block[r]    for each row r
            else as before; in both cases the rest, from K // 32 * 32 on, as before

    Args:
        module: as IREE's phase `executable-targets` leaves it, in the LLVM dialect.
        features: of the CPU that is compiled for, by LLVM's names.
    Source: G. Henry, P. T. P. Tang, A. Heinecke, "Leveraging the bfloat16 Artificial Intelligence
        Datatype For Higher-Precision Computations" (2019); Intel's "Instruction Set Extensions
        Programming Reference", chapter 3; Linux's `Documentation/arch/x86/xstate.rst`.
    """
    from iree.compiler import ir

    if not has_tiles(features):
        return
    with ir.Location.unknown():
        for variant in variants(module):
            _multiply_in(variant)


def _multiply_in(variant: Any) -> None:
    exports = {symbol_of(export): export for export in inside(variant, "hal.executable.export")}
    for inner in inside(variant, "builtin.module"):
        heights = set[int]()
        for function in inside(inner, "llvm.func"):
            export = exports.get(symbol_of(function))
            if export is not None and _LOCAL_MEMORY not in export.attributes:
                heights |= _rewrite(function, export)
        if heights:
            put_functions(inner, library(sorted(heights)))


def _rewrite(function: Any, export: Any) -> set[int]:
    """Rewrite the loops of a function; return how many rows their blocks have."""
    from iree.compiler import ir

    entry, *blocks = function.regions[0].blocks
    loops = list[Loop]()
    for block in blocks:
        is_inside = any(block == level.header for loop in loops for level in loop.levels)
        if not is_inside and (loop := loop_at(block)) is not None and _suits(loop):
            loops.append(loop)
    if len({loop.depth for loop in loops}) > 1:  # whose parts would be in one another's way
        return set()
    if loops:
        with ir.InsertionPoint.at_block_begin(entry):
            memory = put(_PREPARE, [entry.arguments[-1]])
        parts = loops[0].steps * PARTS_BYTES
        export.attributes[_LOCAL_MEMORY] = ir.IntegerAttr.get(
            ir.IndexType.get(), parts + _ALIGNMENT
        )
        for loop in loops:
            _enter(loop, *memory)
    return {loop.height for loop in loops}


def _suits(loop: Loop) -> bool:
    """Say whether the unit can take loops over, and is the faster."""
    is_whole = len(loop.levels) == 1 or math.prod(loop.counts[1:]) % DEPTH == 0
    return is_whole and loop.depth in DEPTHS and LEAST_HEIGHT <= loop.height <= ROWS


def _enter(loop: Loop, lent: Any, product: Any, parts: Any, state: Any) -> None:
    """Let the first step of a loop do all, if the unit can.

    Args:
        loop: the loop.
        lent: whether it is there.
        product: a pointer to memory for a block.
        parts: a pointer to memory for a panel's parts.
        state: a pointer to what is kept from call to call.
    """
    from iree.compiler import ir

    outer, *inner = loop.levels
    k, sums = outer.header.arguments
    attempt, others = go_on_elsewhere(outer.header)
    call, done = (others.create_before() for _ in range(2))
    with ir.InsertionPoint(attempt):
        begin = {k: k} | {level.header.arguments[0]: level.begin for level in inner}
        first = dict(begin)
        rows = [loop.copy(row, first) for row in loop.rows]
        panel = loop.copy(loop.panel, first)
        ahead = list[Any]()
        for level in loop.levels:
            here = level.header.arguments[0]
            (then,) = put(_NEXT, [begin[here]])
            there = {**begin, here: then}
            ahead += [loop.copy(pointer, there) for pointer in (loop.rows[0], loop.panel)]
        can, *strides = put(_can(loop), [k, lent, panel, *ahead, *rows])
        branch(can, call, others)
    with ir.InsertionPoint(call):
        given = [rows[0], panel, product, parts, state, *strides]
        (is_right,) = put(_call(loop), given)
        branch(is_right, done, others)
    with ir.InsertionPoint(done):
        sums, last = put(_add(loop), [sums, product])
        ir.Operation.create("llvm.br", operands=[last, sums], successors=[outer.header])


# A pointer to a worker's own memory is at byte 16 of `iree_hal_executable_workgroup_state_v0_t`.
_PREPARE = f"""
llvm.func @{LENT}() -> i1
func.func @prepare(%workgroup: !llvm.ptr) -> (i1, !llvm.ptr, !llvm.ptr, !llvm.ptr) {{
  %product_bytes = llvm.mlir.constant({ROWS * COLUMNS * 4} : i64) : i64
  %product = llvm.alloca %product_bytes x i8 {{alignment = {_ALIGNMENT} : i64}} : (i64) -> !llvm.ptr
  %memory_at = llvm.getelementptr %workgroup[16] : (!llvm.ptr) -> !llvm.ptr, i8
  %memory = llvm.load %memory_at : !llvm.ptr -> !llvm.ptr
  %address = llvm.ptrtoint %memory : !llvm.ptr to i64
  %before = llvm.mlir.constant({_ALIGNMENT - 1} : i64) : i64
  %mask = llvm.mlir.constant({-_ALIGNMENT} : i64) : i64
  %beyond = llvm.add %address, %before : i64
  %aligned = llvm.and %beyond, %mask : i64
  %parts = llvm.inttoptr %aligned : i64 to !llvm.ptr
  %state_bytes = llvm.mlir.constant({STATE_BYTES} : i64) : i64
  %state = llvm.alloca %state_bytes x i8 {{alignment = 8 : i64}} : (i64) -> !llvm.ptr
  %zeros = llvm.mlir.constant(dense<0> : vector<{STATE_BYTES}xi8>) : vector<{STATE_BYTES}xi8>
  llvm.store %zeros, %state <alignment = 8> : vector<{STATE_BYTES}xi8>, !llvm.ptr
  %lent = llvm.call @{LENT}() : () -> i1
  return %lent, %product, %parts, %state : i1, !llvm.ptr, !llvm.ptr, !llvm.ptr
}}
"""
_NEXT = """
func.func @next(%k: i64) -> i64 {
  %one = llvm.mlir.constant(1 : i64) : i64
  %next = llvm.add %k, %one : i64
  return %next : i64
}
"""


def _can(loop: Loop) -> str:
    """Write what says whether loops are at their beginning, and read as the unit is to.

    It returns that, how many bytes there are from row to row, and from row to row of the panel, and
    how many more where the rows go on elsewhere. Where these are known when the code is compiled,
    nothing is left of it.
    """
    names = [f"%row{r}" for r in range(loop.height)]
    ahead = [(f"%row_next{i}", f"%panel_next{i}") for i, _ in enumerate(loop.levels)]
    lines, checks = list[str](), list[tuple[str, str]]()

    def distance(one: str, other: str) -> str:
        name = f"%distance{len(lines)}"
        lines.extend(
            [
                f"%from{name[1:]} = llvm.ptrtoint {one} : !llvm.ptr to i64",
                f"%to{name[1:]} = llvm.ptrtoint {other} : !llvm.ptr to i64",
                f"{name} = llvm.sub %to{name[1:]}, %from{name[1:]} : i64",
            ]
        )
        return name

    def times(value: str, count: int) -> str:
        name = f"%times{len(lines)}"
        lines.append(f"%by{name[1:]} = llvm.mlir.constant({count} : i64) : i64")
        lines.append(f"{name} = llvm.mul {value}, %by{name[1:]} : i64")
        return name

    stride = distance(names[0], names[1])
    checks += [(distance(one, other), stride) for one, other in itertools.pairwise(names[1:])]
    width = distance("%panel", ahead[-1][1])
    for i, (row_next, panel_next) in enumerate(ahead):
        inside = math.prod(loop.counts[i + 1 :])
        checks.append((distance("%panel", panel_next), times(width, inside)))
        if i > 0 or len(ahead) == 1:
            checks.append((distance(names[0], row_next), times("%size", inside)))
    jump = "%zero"
    if len(ahead) > 1:
        jump = "%jump"
        on, run = distance(names[0], ahead[0][0]), times("%size", loop.run * DEPTH)
        lines.append(f"%jump = llvm.sub {on}, {run} : i64")
    for i, (one, other) in enumerate(checks):
        lines.append(f'%is{i} = llvm.icmp "eq" {one}, {other} : i64')
        lines.append(f"%can{i + 1} = llvm.and %can{i}, %is{i} : i1")
    pointers = ["%panel", *itertools.chain(*ahead), *names]
    body = "\n  ".join(lines)
    return f"""
func.func @can(%k: i64, %lent: i1, {", ".join(f"{name}: !llvm.ptr" for name in pointers)})
    -> (i1, i64, i64, i64) {{
  %zero = llvm.mlir.constant(0 : i64) : i64
  %size = llvm.mlir.constant(4 : i64) : i64
  %is_begin = llvm.icmp "eq" %k, %zero : i64
  %can0 = llvm.and %is_begin, %lent : i1
  {body}
  return %can{len(checks)}, {stride}, {width}, {jump} : i1, i64, i64, i64
}}
"""


def _call(loop: Loop) -> str:
    name = multiply_function(loop.height)
    types = "(!llvm.ptr, i64, !llvm.ptr, i64, i64, i64, i64, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> i1"
    return f"""
llvm.func @{name}{types}
func.func @call(%rows: !llvm.ptr, %panel: !llvm.ptr, %product: !llvm.ptr, %parts: !llvm.ptr,
    %state: !llvm.ptr, %stride: i64, %width: i64, %jump: i64) -> i1 {{
  %steps = llvm.mlir.constant({loop.steps} : i64) : i64
  %run = llvm.mlir.constant({loop.run} : i64) : i64
  %is_right = llvm.call @{name}(%rows, %stride, %panel, %width, %steps, %run, %jump, %product,
      %parts, %state) : {types}
  return %is_right : i1
}}
"""


def _add(loop: Loop) -> str:
    end = loop.steps * DEPTH if len(loop.levels) == 1 else loop.counts[0]
    vector = f"vector<{COLUMNS}xf32>"
    sums = f"!llvm.array<{loop.height} x {vector}>"
    lines = []
    for r in range(loop.height):
        lines += [
            f"%at{r} = llvm.getelementptr %product[{r}] : (!llvm.ptr) -> !llvm.ptr, {vector}",
            f"%product{r} = llvm.load %at{r} <alignment = 64> : !llvm.ptr -> {vector}",
            f"%before{r} = llvm.extractvalue %sums{r}[{r}] : {sums}",
            f"%sum{r} = llvm.fadd %before{r}, %product{r} : {vector}",
            f"%sums{r + 1} = llvm.insertvalue %sum{r}, %sums{r}[{r}] : {sums}",
        ]
    body = "\n  ".join(lines)
    return f"""
func.func @add(%sums0: {sums}, %product: !llvm.ptr) -> ({sums}, i64) {{
  {body}
  %end = llvm.mlir.constant({end} : i64) : i64
  return %sums{loop.height}, %end : {sums}, i64
}}
"""

"""Have the CPU's matrix unit multiply floats, each of them as a sum of three bfloat16."""

from __future__ import annotations

import itertools
import platform
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from lowering.stages.symbols import inside, symbol_of, variants
from lowering.stages.templates import put, put_functions
from lowering.stages.tile_functions import (
    COLUMNS,
    DEPTH,
    LENT,
    PARTS_BYTES,
    ROWS,
    STATE_BYTES,
    library,
    multiply_function,
)

_LEAST_HEIGHT = 13  # of a block: a tile takes as long with fewer rows
_FEATURES = frozenset({"amx-tile", "amx-bf16", "avx512bw", "avx512dq"})
# Of a product, where the unit is faster: what is taken apart is used often, and the loop is long.
# The parts of a panel of the greatest depth are 960 KiB, half of the second cache of such CPUs.
_LEAST_ROWS, _DEPTHS = 64, range(192, 5121)
_LOCAL_MEMORY = "workgroup_local_memory"
_ALIGNMENT = 64
_SUMS = re.compile(rf"!llvm\.array<(\d+) x vector<{COLUMNS}xf32>>")


def has_tiles(features: Collection[str]) -> bool:
    """Say whether code for a CPU may use its matrix unit, by LLVM's names of what it can do."""
    return frozenset(features) >= _FEATURES and platform.system() == "Linux"


def suits_tiles(rows: int, depth: int) -> bool:
    """Say whether the unit is the faster for a product of so many rows, and so deep."""
    return rows >= _LEAST_ROWS and depth in _DEPTHS


def multiply_tiles(module: Any, features: Collection[str]) -> None:
    """Compute blocks of products by tiles, as precisely as in float32.

    A float32 is the sum of three bfloat16, of 8 bits each: x = x0 + x1 + x2. Of the nine products
    of such parts, six are as precise as one in float32. The unit makes the six in 0.4 of the time
    that vectors take for the one; meanwhile, vectors take the next numbers apart.

    The loop that was there stays, for what the parts do not hold (infinities, very large and very
    small numbers), where the system does not lend the unit to the process, and for what is less
    than a step of the unit.

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
    loops = [loop for block in blocks if (loop := _loop_at(block)) is not None]
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
            loop.rewrite(*memory)
    return {loop.height for loop in loops}


@dataclass(frozen=True)
class _Loop:
    """The loop that adds up one block of a product.

    Attributes:
        header: its block of `(k, sums)`, which ends it or goes on to `body`.
        body: the block that adds.
        depth: how often.
        rows: pointers to what it reads of each row.
        panel: a pointer to what it reads of the panel.
    """

    header: Any
    body: Any
    depth: int
    rows: Sequence[Any]
    panel: Any

    @property
    def height(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    @property
    def steps(self) -> int:
        """How many steps of the unit there are; less than one may be left over."""
        return self.depth // DEPTH

    def rewrite(self, lent: Any, product: Any, parts: Any, state: Any) -> None:
        """Let the first step do all, if the unit can.

        Args:
            lent: whether it is there.
            product: a pointer to memory for a block.
            parts: a pointer to memory for a panel's parts.
            state: a pointer to what is kept from call to call.
        """
        from iree.compiler import ir

        k, sums = self.header.arguments
        (*_, end) = self.header.operations
        attempt, call, done = (self.body.create_before() for _ in range(3))
        with ir.InsertionPoint(end):
            _branch(end.operands[0], attempt, end.operation.successors[1])
        end.operation.erase()
        with ir.InsertionPoint(attempt):
            (next_k,) = put(_NEXT, [k])
            here, there = ({k: index} for index in (k, next_k))
            rows = [_copy(row, self.body, here) for row in self.rows]
            panel = _copy(self.panel, self.body, here)
            ahead = [_copy(p, self.body, there) for p in (self.rows[0], self.panel)]
            can, stride = put(_can(self.height), [k, lent, panel, *ahead, *rows])
            _branch(can, call, self.body)
        with ir.InsertionPoint(call):
            (is_right,) = put(_call(self), [rows[0], stride, panel, product, parts, state])
            _branch(is_right, done, self.body)
        with ir.InsertionPoint(done):
            sums, last = put(_add(self), [sums, product])
            ir.Operation.create("llvm.br", operands=[last, sums], successors=[self.header])


def _loop_at(header: Any) -> _Loop | None:
    """Return the loop that a block is the header of; None if it is not one of a product."""
    from iree.compiler import ir

    if len(header.arguments) != 2 or not (kind := _SUMS.fullmatch(str(header.arguments[1].type))):
        return None
    k, sums = header.arguments
    (*_, end) = header.operations
    if end.operation.name != "llvm.cond_br" or len(end.operands) != 1:
        return None
    test = end.operands[0].owner
    if test.name != "llvm.icmp" or test.operands[0] != k:
        return None
    depth = _constant(test.operands[1])
    body = end.operation.successors[0]
    loads = [op.operation for op in body.operations if op.operation.name == "llvm.load"]
    panels = [op for op in loads if str(op.results[0].type) == f"vector<{COLUMNS}xf32>"]
    rows = [op for op in loads if isinstance(op.results[0].type, ir.F32Type)]
    height = int(kind[1])
    if depth is None or depth not in _DEPTHS or not _LEAST_HEIGHT <= height <= ROWS:
        return None
    if len(panels) != 1 or len(rows) != height or len(loads) != height + 1:
        return None
    if not all(_is_added(row, panels[0], sums, i) for i, row in enumerate(rows)):
        return None
    return _Loop(header, body, depth, [row.operands[0] for row in rows], panels[0].operands[0])


def _is_added(row: Any, panel: Any, sums: Any, index: int) -> bool:
    """Say whether a number of a row, times the panel, is added to one of the sums, and that alone.

    Before that it is put into a vector, and repeated.
    """
    value = row
    for name in ("llvm.insertelement", "llvm.shufflevector", "llvm.intr.fmuladd"):
        uses = [use.owner.operation for use in value.results[0].uses]
        if len(uses) != 1 or uses[0].name != name:
            return False
        before, value = value, uses[0]
    one, other, sum_ = value.operands
    if {one, other} != {before.results[0], panel.results[0]} or sum_.owner.operands[0] != sums:
        return False
    uses = [use.owner.operation for use in value.results[0].uses]
    positions = [list(op.attributes["position"]) for op in (sum_.owner, *uses)]
    return [use.name for use in uses] == ["llvm.insertvalue"] and positions == [[index]] * 2


def _constant(value: Any) -> int | None:
    owner = value.owner
    is_constant = getattr(owner, "name", "") == "llvm.mlir.constant"
    return owner.attributes["value"].value if is_constant else None


def _copy(value: Any, block: Any, copies: dict[Any, Any]) -> Any:
    """Compute a value of a block again at the insertion point; `copies` are those there are."""
    from iree.compiler import ir

    if value not in copies:
        owner = value.owner
        if isinstance(owner, ir.Block) or owner.operation.block != block:
            return value
        operands = [_copy(operand, block, copies) for operand in owner.operands]
        copy = owner.operation.clone()
        for i, operand in enumerate(operands):
            copy.operands[i] = operand
        copies[value] = copy.results[0]
    return copies[value]


def _branch(condition: Any, one: Any, other: Any) -> None:
    from iree.compiler import ir

    sizes = ir.DenseI32ArrayAttr.get([1, 0, 0])
    ir.Operation.create(
        "llvm.cond_br",
        operands=[condition],
        successors=[one, other],
        attributes={"operandSegmentSizes": sizes},
    )


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


def _can(height: int) -> str:
    """Write what says whether a loop is at its beginning, and reads as the unit is to.

    Where that is known when the code is compiled, and it is, nothing is left of the second.
    """
    names = [f"%row{r}" for r in range(height)]
    lines = []
    pairs = [("%panel", "%panel_next", "%width"), (names[0], "%row_next", "%size")]
    pairs += [(one, other, "%stride") for one, other in itertools.pairwise(names)]
    for i, (one, other, distance) in enumerate(pairs):
        lines += [
            f"%from{i} = llvm.ptrtoint {one} : !llvm.ptr to i64",
            f"%to{i} = llvm.ptrtoint {other} : !llvm.ptr to i64",
            f"%distance{i} = llvm.sub %to{i}, %from{i} : i64",
            f'%is{i} = llvm.icmp "eq" %distance{i}, {distance} : i64',
            f"%can{i + 1} = llvm.and %can{i}, %is{i} : i1",
        ]
    body = "\n  ".join(lines)
    return f"""
func.func @can(%k: i64, %lent: i1, %panel: !llvm.ptr, %row_next: !llvm.ptr, %panel_next: !llvm.ptr,
    {", ".join(f"{name}: !llvm.ptr" for name in names)}) -> (i1, i64) {{
  %zero = llvm.mlir.constant(0 : i64) : i64
  %width = llvm.mlir.constant({COLUMNS * 4} : i64) : i64
  %size = llvm.mlir.constant(4 : i64) : i64
  %first = llvm.ptrtoint {names[0]} : !llvm.ptr to i64
  %second = llvm.ptrtoint {names[1]} : !llvm.ptr to i64
  %stride = llvm.sub %second, %first : i64
  %is_begin = llvm.icmp "eq" %k, %zero : i64
  %can0 = llvm.and %is_begin, %lent : i1
  {body}
  return %can{len(pairs)}, %stride : i1, i64
}}
"""


def _call(loop: _Loop) -> str:
    name = multiply_function(loop.height)
    types = "(!llvm.ptr, i64, !llvm.ptr, i64, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> i1"
    return f"""
llvm.func @{name}{types}
func.func @call(%rows: !llvm.ptr, %stride: i64, %panel: !llvm.ptr, %product: !llvm.ptr,
    %parts: !llvm.ptr, %state: !llvm.ptr) -> i1 {{
  %steps = llvm.mlir.constant({loop.steps} : i64) : i64
  %is_right = llvm.call @{name}(%rows, %stride, %panel, %steps, %product, %parts, %state)
      : {types}
  return %is_right : i1
}}
"""


def _add(loop: _Loop) -> str:
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
  %end = llvm.mlir.constant({loop.steps * DEPTH} : i64) : i64
  return %sums{loop.height}, %end : {sums}, i64
}}
"""

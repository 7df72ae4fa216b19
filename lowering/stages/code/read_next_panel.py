"""Have products ask for the next panel of a matrix while they multiply by this one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowering.stages.code.places import place_of, stride_of
from lowering.stages.code.prefetch import prefetch
from lowering.stages.code.product_loops import Loop, loop_at
from lowering.stages.ir.matrix_unit import COLUMNS
from lowering.stages.ir.symbols import constant_of, maker_of
from lowering.stages.ir.templates import put

_FLOAT_BYTES, _LINE_BYTES = 4, 64
_ROW_BYTES = COLUMNS * _FLOAT_BYTES  # of a panel
_MOST_BYTES = 448 << 10  # of a panel: the second cache is to have two of them
_RATIO_BITS = 16
# Bytes of the panel for each step of a row, as a fraction; and which of them to ask for.
_RATIO = """
func.func @ratio(%rows: i64) -> i64 {{
  %row_bytes = llvm.mlir.constant({row_bytes} : i64) : i64
  %bits = llvm.mlir.constant({bits} : i64) : i64
  %whole = llvm.shl %row_bytes, %bits : i64
  %one = llvm.mlir.constant(1 : i64) : i64
  %below = llvm.udiv %whole, %rows : i64
  %ratio = llvm.add %below, %one : i64
  return %ratio : i64
}}
"""
_PLACE = """
func.func @place(%panel: !llvm.ptr, %k: i64, %row: i64, %ratio: i64) -> !llvm.ptr {{
  %depth = llvm.mlir.constant({depth} : i64) : i64
  %height = llvm.mlir.constant({height} : i64) : i64
  %bits = llvm.mlir.constant({bits} : i64) : i64
  %row_bytes = llvm.mlir.constant({row_bytes} : i64) : i64
  %panel_bytes = llvm.mlir.constant({panel_bytes} : i64) : i64
  %blocks = llvm.mul %row, %depth : i64
  %block = llvm.mul %k, %height : i64
  %done = llvm.add %blocks, %block : i64
  %done_bytes = llvm.mul %done, %ratio : i64
  %asked = llvm.lshr %done_bytes, %bits : i64
  %read = llvm.mul %k, %row_bytes : i64
  %back = llvm.sub %asked, %read : i64
  %ahead = llvm.add %back, %panel_bytes : i64
  %place = llvm.getelementptr %panel[%ahead] : (!llvm.ptr, i64) -> !llvm.ptr, i8
  return %place : !llvm.ptr
}}
"""
_NUMBER = """
func.func @number() -> i64 {{
  %number = llvm.mlir.constant({number} : i64) : i64
  return %number : i64
}}
"""


def read_next_panel(function: Any, cache: int) -> list[Any]:
    """Prefetch the next panel of the second factor, a part with each block of rows.

    A product multiplies one panel by block after block of its rows (`read_in_panels` in
    `lowering.stages.linalg`). The first of them waits for the memory, and has the panel in the
    second cache for the others, while the memory has nothing to do. A C program of these loops, 132
    rows by panels of 1024 that no cache has, makes 282 GFLOP/s so, and 253 with prefetches of what
    is next in the panel; of 36 rows, 277 and 212 (two cores of an Emerald Rapids). Where two panels
    are more than the cache has, it is slower.

    Before: for each panel: for each block, of `height` rows from `row` on: for each k:
                %w = llvm.load %p : vector<32xf32>; height x llvm.intr.fmuladd
    After:  the same, with a prefetch of the next panel's byte
            (row * depth + k * height) * 128 / rows

    Args:
        function: of device code, in the LLVM dialect.
        cache: where to keep what is asked for, as LLVM counts.

    Returns:
        The blocks that ask now.
    """
    blocks = [b for header in function.regions[0].blocks if (b := _block_at(header)) is not None]
    rows = max((block.end for block in blocks if isinstance(block.end, int)), default=1)
    for block in blocks:
        block.ask(rows, cache)
    return [block.loop.levels[0].body for block in blocks]


@dataclass(frozen=True)
class _Block:
    """Rows that are multiplied by a panel at a time.

    Attributes:
        loop: what multiplies them.
        row: which is the first of them: a loop's argument, or a number.
        end: of the last such rows: a number, or a value.
        begin: of that value, where it is read: what is computed in each step of the loop.
    """

    loop: Loop
    row: Any
    end: Any
    begin: Any = None

    def ask(self, rows: int, cache: int) -> None:
        """Ask for as much of the next panel as these are of all rows: so many, if known."""
        from iree.compiler import ir

        loop, sizes = self.loop, {"bits": _RATIO_BITS, "row_bytes": _ROW_BYTES}
        text = _PLACE.format(
            depth=loop.depth, height=loop.height, panel_bytes=loop.depth * _ROW_BYTES, **sizes
        )
        k, reader = loop.levels[0].header.arguments[0], _reader_of(loop)
        if self.begin is None:
            lines = -(-loop.height * _ROW_BYTES // (rows * _LINE_BYTES))
            ratio: Any = (_ROW_BYTES << _RATIO_BITS) // rows + 1
        else:
            lines = 1
            with ir.InsertionPoint.after(self.begin.owner), ir.Location.unknown():
                (ratio,) = put(_RATIO.format(**sizes), [_value(self.end)])
        with ir.InsertionPoint(reader), ir.Location.unknown():
            (place,) = put(text, [loop.panel, k, _value(self.row), _value(ratio)])
        for line in range(lines):
            prefetch(reader, place, line * _LINE_BYTES, cache)


def _value(number: Any) -> Any:
    """Return a value, at the insertion point: one, or that of a number."""
    return put(_NUMBER.format(number=number), [])[0] if isinstance(number, int) else number


def _block_at(header: Any) -> _Block | None:
    """Return the rows that a loop multiplies; None if it is no loop over a panel's rows."""
    loop = loop_at(header)
    if loop is None or len(loop.levels) > 1 or loop.depth * _ROW_BYTES > _MOST_BYTES:
        return None
    k = header.arguments[0]
    stride = stride_of(loop.rows)
    if stride is None or place_of(loop.panel)[k] != COLUMNS:
        return None
    place = place_of(loop.rows[0])
    for value, count in place.items():
        if value is None or value == k or count != stride:
            continue
        if isinstance(end := _end_of(value), int):
            return _Block(loop, value, end)
        for row in _moved_back(value):
            if (end := _end_of(row)) is not None:
                return _Block(loop, row, end, begin=value)
    row = place[None] // stride
    return _Block(loop, row, row + loop.height)


def _moved_back(value: Any) -> list[Any]:
    """Return what adds up to a row, unless the last block begins before, such that it is whole."""
    if maker_of(value) != "llvm.intr.umin":
        return []
    row = value.owner.operands[0]
    return list(row.owner.operands) if maker_of(row) == "llvm.add" else [row]


def _end_of(value: Any) -> Any:
    """Return what a loop's argument is less than: a number or a value; None if it is of no loop."""
    for use in value.uses:
        op = use.owner.operation
        if op.name == "llvm.icmp" and op.operands[0] == value:
            number = constant_of(op.operands[1])
            return op.operands[1] if number is None else number
    return None


def _reader_of(loop: Loop) -> Any:
    body = loop.levels[0].body
    return next(op for op in body.operations if loop.panel in list(op.operation.operands))

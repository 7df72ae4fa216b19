"""Write softmax so that each exponential is computed once, and row by row, in the first cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from lowering.cpu import best_for
from lowering.stages.ir.dispatch_work import STORE, walk
from lowering.stages.ir.factors import shapes_of
from lowering.stages.ir.templates import floats, replace_by

_LANES = range(8, 17)  # numbers at a time: the most of these that divide a row
# Rows of at most so many numbers are taken as a whole, of twice as many if nothing divides them.
_SHORT_ROW = {frozenset({"avx512f"}): 128, frozenset[str](): 32}
_LONG_ROW = 4096  # a row is kept on the stack, of which IREE gives a device program 32 KB
_ITEM = 8192  # floats of a work item
_SOFTMAX = """
#lines = #iree_cpu.lowering_config<{line_tiles}>
#lanes = #iree_cpu.lowering_config<{lane_tiles}>
#quotients = #iree_codegen.compilation_info<
    lowering_config = #iree_cpu.lowering_config<{tiles}>,
    translation_info = #iree_codegen.translation_info<
        pipeline = #iree_cpu.pipeline<DoubleTilingExpert>>>
func.func private @softmax(%x: {whole}, %place: {whole}) -> {whole} {{
  %lines = tensor.expand_shape %x {groups} output_shape {sizes} : {whole} into {lines}
  %no_lines = tensor.empty() : {lines}
  %no_lanes = tensor.empty() : {lanes}
  %no_rows = tensor.empty() : {rows}
  %least = arith.constant 0xFF800000 : f32
  %zero = arith.constant 0.0 : f32
  %least_lanes = linalg.fill ins(%least : f32) outs(%no_lanes : {lanes}) -> {lanes}
  %least_rows = linalg.fill ins(%least : f32) outs(%no_rows : {rows}) -> {rows}
  %zero_lanes = linalg.fill ins(%zero : f32) outs(%no_lanes : {lanes}) -> {lanes}
  %zero_rows = linalg.fill ins(%zero : f32) outs(%no_rows : {rows}) -> {rows}
  %largest_lanes = linalg.generic {{
      indexing_maps = [{on_lines}, {on_lanes}], iterator_types = [{loops}, "reduction"]}}
      ins(%lines : {lines}) outs(%least_lanes : {lanes})
      attrs = {{lowering_config = #lines}} {{
  ^bb0(%a: f32, %b: f32):
    %c = arith.maximumf %a, %b : f32
    linalg.yield %c : f32
  }} -> {lanes}
  %largest = linalg.generic {{
      indexing_maps = [{of_lanes}, {of_rows}], iterator_types = [{outer}, "reduction"]}}
      ins(%largest_lanes : {lanes}) outs(%least_rows : {rows})
      attrs = {{lowering_config = #lanes}} {{
  ^bb0(%a: f32, %b: f32):
    %c = arith.maximumf %a, %b : f32
    linalg.yield %c : f32
  }} -> {rows}
  %exponentials, %sums = linalg.generic {{
      indexing_maps = [{on_lines}, {on_rows}, {on_lines}, {on_lanes}],
      iterator_types = [{loops}, "reduction"]}}
      ins(%lines, %largest : {lines}, {rows}) outs(%no_lines, %zero_lanes : {lines}, {lanes})
      attrs = {{lowering_config = #lines}} {{
  ^bb0(%a: f32, %b: f32, %unset: f32, %sum: f32):
    %c = arith.subf %a, %b : f32
    %d = math.exp %c : f32
    %e = arith.addf %sum, %d : f32
    linalg.yield %d, %e : f32, f32
  }} -> ({lines}, {lanes})
  %sum = linalg.generic {{
      indexing_maps = [{of_lanes}, {of_rows}], iterator_types = [{outer}, "reduction"]}}
      ins(%sums : {lanes}) outs(%zero_rows : {rows})
      attrs = {{lowering_config = #lanes}} {{
  ^bb0(%a: f32, %b: f32):
    %c = arith.addf %b, %a : f32
    linalg.yield %c : f32
  }} -> {rows}
  %quotients = linalg.generic {{
      indexing_maps = [{by_lines}, {by_rows}, {by_lines}],
      iterator_types = [{outer}, "parallel", "parallel"]}}
      ins(%exponentials, %sum : {lines}, {rows}) outs(%no_lines : {lines})
      attrs = {{compilation_info = #quotients}} {{
  ^bb0(%a: f32, %b: f32, %unset: f32):
    %c = arith.divf %a, %b : f32
    linalg.yield %c : f32
  }} -> {lines}
  %y = tensor.collapse_shape %quotients {groups} : {lines} into {whole}
  return %y : {whole}
}}
"""


def store_exponentials(module: Any, features: Collection[str]) -> None:
    """Write each softmax along the last dimension as four loops over a row, by lanes.

    IREE computes the exponentials twice, once for their sum and once for the quotients, and reduces
    16 numbers to one at each step of the sum and of the maximum. Here the sum's loop keeps them on
    the stack, and lanes are added up once. Rows come one after the other, so that each loop finds
    its row in the first cache. 2000 rows of 1504 floats take half of the time (two cores of an
    EPYC, Zen 4).

    Before: %y = linalg.softmax dimension(1) ins(%x)                    with %x of [R, N]
    After:  %m[r, l] = max over j of %x[r, j, l]                        with %x of [R, N/16, 16]
            %m[r] = max over l of %m[r, l]
            %e[r, j, l], %s[r, l] = exp(%x[r, j, l] - %m[r]), sum over j of it
            %s[r] = sum over l of %s[r, l]
            %y[r, j, l] = %e[r, j, l] / %s[r]

    Args:
        module: one in flow, its dispatches formed.
        features: of the CPU that is compiled for, by LLVM's names.
    """
    short = best_for(features, _SHORT_ROW)
    for op in [op for op in walk(module) if op.name == "linalg.softmax"]:
        if (rows := _rows_of(op, short)) is not None:
            replace_by(op, rows.text(), list(op.operands))


def _rows_of(op: Any, short: int) -> _Rows | None:
    """Return what a softmax is computed of; None if it cannot be written so.

    What is computed of its quotients, in the same device program, would have to be by lines, too.
    """
    shapes = shapes_of(op)
    if shapes is None or op.attributes["dimension"].value != len(shapes[0]) - 1:
        return None
    if any(use.owner.name != STORE for use in op.results[0].uses):
        return None
    (*outer, numbers) = shapes[0]
    lanes = _lanes(numbers, short)
    return _Rows(tuple(outer), numbers // lanes, lanes) if outer and lanes else None


def _lanes(numbers: int, short: int) -> int:
    """Return how many numbers of a row are taken at a time; 0: no number is good.

    Args:
        numbers: in a row.
        short: a row that is taken as a whole.
    """
    if numbers <= short:
        return numbers
    found = [n for n in _LANES if numbers % n == 0 and numbers <= _LONG_ROW]
    return max(found, default=numbers if numbers <= 2 * short else 0)


@dataclass(frozen=True)
class _Rows:
    """Rows of so many lines, each of so many lanes."""

    outer: tuple[int, ...]
    lines: int
    lanes: int

    def text(self) -> str:
        """Write a function that is their softmax."""
        rank = len(self.outer)
        rows = [f"r{i}" for i in range(rank)]
        item = [1] * (rank - 1) + [max(1, _ITEM // (self.lines * self.lanes))]
        one = [1] * rank
        by_lane, by_line = [*rows, "l", "j"], [*rows, "j", "l"]
        return _SOFTMAX.format(
            whole=floats(*self.outer, self.lines * self.lanes),
            lines=floats(*self.outer, self.lines, self.lanes),
            lanes=floats(*self.outer, self.lanes),
            rows=floats(*self.outer),
            groups=[*([i] for i in range(rank)), [rank, rank + 1]],
            sizes=[*self.outer, self.lines, self.lanes],
            outer=", ".join(['"parallel"'] * rank),
            loops=", ".join(['"parallel"'] * (rank + 1)),
            on_lines=_map(by_lane, by_line),
            on_lanes=_map(by_lane, [*rows, "l"]),
            on_rows=_map(by_lane, rows),
            of_lanes=_map([*rows, "l"], [*rows, "l"]),
            of_rows=_map([*rows, "l"], rows),
            line_tiles=_tiles(
                common_parallel=[*one, self.lanes, 0], reduction=[0] * (rank + 1) + [1]
            ),
            lane_tiles=_tiles(common_parallel=[*one, 0], reduction=[0] * rank + [self.lanes]),
            by_lines=_map(by_line, by_line),
            by_rows=_map(by_line, rows),
            tiles=f"distribution = {[*item, 0, 0]}, "
            + _tiles(common_parallel=[*one, 0, 0], inner_parallel=[0] * rank + [1, self.lanes]),
        )


def _map(loops: Sequence[str], results: Sequence[str]) -> str:
    return f"affine_map<({', '.join(loops)}) -> ({', '.join(results)})>"


def _tiles(**vectors: Sequence[int]) -> str:
    return ", ".join(f"vector_{name} = {list(sizes)}" for name, sizes in vectors.items())

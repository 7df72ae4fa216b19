"""The loops that add up a block of a product, in the LLVM dialect: found and read."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowering.stages.code.branches import is_next, successors
from lowering.stages.ir.matrix_unit import COLUMNS, DEPTH
from lowering.stages.ir.symbols import constant_of, maker_of

_EFFECTS = ("llvm.call", "llvm.store")
_SUMS = re.compile(rf"!llvm\.array<(\d+) x vector<{COLUMNS}xf32>>")


@dataclass(frozen=True)
class Level:
    """A loop.

    Attributes:
        header: its block of `(k, sums)`, which ends it or goes on to `body`.
        body: the block that adds, or goes on to the loop inside; may be the header itself.
        count: how often.
        begin: what the first `k` is; None of the outermost.
    """

    header: Any
    body: Any
    count: int
    begin: Any = None


@dataclass(frozen=True)
class Loop:
    """The loops that add up one block of a product, each inside the one before.

    Attributes:
        levels: the loops.
        rows: pointers to what is read of each row.
        panel: a pointer to what is read of the panel.
    """

    levels: Sequence[Level]
    rows: Sequence[Any]
    panel: Any

    @property
    def height(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    @property
    def counts(self) -> list[int]:
        """How often each loop goes on."""
        return [level.count for level in self.levels]

    @property
    def depth(self) -> int:
        """How many numbers are added up."""
        return math.prod(self.counts)

    @property
    def steps(self) -> int:
        """How many steps of the unit there are; less than one may be left over of a single loop."""
        return self.depth // DEPTH

    @property
    def run(self) -> int:
        """After how many steps the rows go on elsewhere."""
        return math.prod(self.counts[1:]) // DEPTH if len(self.levels) > 1 else self.steps

    def copy(self, value: Any, copies: dict[Any, Any]) -> Any:
        """Compute a value of the loops again, at the insertion point, from those in `copies`."""

        if value not in copies:
            owner = value.owner
            is_inside = maker_of(value) and any(
                owner.operation.block == level.body for level in self.levels
            )
            if not is_inside:
                return value
            operands = [self.copy(operand, copies) for operand in owner.operands]
            copy = owner.operation.clone()
            for i, operand in enumerate(operands):
                copy.operands[i] = operand
            copies[value] = copy.results[0]
        return copies[value]


def loop_at(header: Any) -> Loop | None:
    """Return the loops that a block is the header of; None if they are not those of a product."""
    from iree.compiler import ir

    levels = _levels_at(header)
    if levels is None:
        return None
    sums, body = levels[-1].header.arguments[1], levels[-1].body
    kind = _SUMS.fullmatch(str(sums.type))
    loads = [op.operation for op in body.operations if op.operation.name == "llvm.load"]
    panels = [op for op in loads if str(op.results[0].type) == f"vector<{COLUMNS}xf32>"]
    rows = [op for op in loads if isinstance(op.results[0].type, ir.F32Type)]
    if kind is None or len(panels) != 1 or not len(rows) == int(kind[1]) == len(loads) - 1:
        return None
    if not all(_is_added(row, panels[0], sums, i) for i, row in enumerate(rows)):
        return None
    return Loop(levels, [row.operands[0] for row in rows], panels[0].operands[0])


def _levels_at(header: Any, begin: Any = None) -> list[Level] | None:
    """Return the loop that a block is the header of, and those inside; None if it is of none."""
    if len(header.arguments) != 2:
        return None
    k, sums = header.arguments
    (*_, end) = header.operations
    if end.operation.name != "llvm.cond_br":
        return None
    test = end.operands[0].owner
    count = constant_of(test.operands[1]) if test.name == "llvm.icmp" else None
    if count is None or test.operands[0] != k:
        return None
    body = header if len(end.operands) > 1 else successors(end)[0]
    level = Level(header, body, count, begin)
    (*before, on) = body.operations
    if any(op.operation.name in _EFFECTS for op in before):
        return None
    if on.operation.name == "llvm.br" and on.operation.successors[0] == header:
        return [level] if is_next(on.operands[0], k) else None
    inside, given = successors(on)[0], list(on.operands)[-2:]
    if len(given) < 2 or given[1] != sums or constant_of(given[0]) != 0:
        return None
    levels = _levels_at(inside, given[0])
    if levels is None:
        return None
    (*_, leave) = inside.operations
    (*before, back) = leave.operation.successors[1].operations
    is_back = back.operation.name == "llvm.br" and back.operation.successors[0] == header
    if not is_back or any(op.operation.name in _EFFECTS for op in before):
        return None
    is_same = is_next(back.operands[0], k) and back.operands[1] == inside.arguments[1]
    return [level, *levels] if is_same else None


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

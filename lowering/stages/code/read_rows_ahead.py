"""Have the products of a matrix and a vector ask for the next rows while they read these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from lowering.stages.code.places import stride_of
from lowering.stages.code.prefetch import SECOND_CACHE, cache_for, prefetch
from lowering.stages.code.read_ahead import is_vector_load
from lowering.stages.ir.symbols import device_functions

_LEAST_ROWS = 4
_FLOAT_BYTES = 4
# The next rows, or, of long ones, what comes next in each: a second cache may be small.
_MOST_BYTES = 128 << 10
_AHEAD_IN_ROW_BYTES = 2048


def read_rows_ahead(module: Any, features: Collection[str]) -> None:
    """Prefetch the rows of a matrix that come after those which a vector is multiplied by.

    Rows that are read side by side (`lowering.stages.flow.read_by_rows`) are in pages of their own,
    and a CPU finds out in each page anew what is read. A C program of the same loop reads rows of
    1024 floats at 21.9 GB/s without, at 25.9 with prefetches of the next 8 rows; those of 11008 at
    27.5 and 30.2 (two cores of an EPYC, Zen 4). Into the first cache, they gain nothing; nor do
    they on a Zen 5.

    Before: 8 x (%w = llvm.load %p : vector<16xf32>; llvm.intr.fma(%w, %x, %nothing))
    After:  8 x (%a = llvm.getelementptr %p[8 rows] : i8; llvm.intr.prefetch %a; the same)

    Args:
        module: as IREE's phase `executable-targets` leaves it, in the LLVM dialect.
        features: of the CPU that is compiled for, by LLVM's names.
    """
    if cache_for(features) is None:
        return
    for function in device_functions(module):
        for block in function.regions[0].blocks:
            for loads in _rows_side_by_side(list(block.operations)):
                pointers = [load.operation.operands[0] for load in loads]
                if (row := stride_of(pointers)) is None:
                    continue
                rows = len(loads) * row * _FLOAT_BYTES
                ahead = rows if rows <= _MOST_BYTES else _AHEAD_IN_ROW_BYTES
                for load, pointer in zip(loads, pointers, strict=True):
                    prefetch(load, pointer, ahead, SECOND_CACHE)


def _rows_side_by_side(ops: Sequence[Any]) -> list[list[Any]]:
    """Return the loads of what is multiplied by the same vector, in order; once for several."""
    products = [op for op in ops if op.operation.name == "llvm.intr.fma"]
    if len(products) < _LEAST_ROWS:
        return []
    loads = {op.operation.results[0]: op for op in ops if is_vector_load(op)}
    found: dict[Any, list[Any]] = defaultdict(list)
    for op in products:
        row, vector, _ = op.operation.operands
        if row in loads:
            found[vector].append(row)
    several = dict.fromkeys(tuple(rows) for rows in found.values() if len(rows) >= _LEAST_ROWS)
    return [[loads[row] for row in rows] for rows in several]

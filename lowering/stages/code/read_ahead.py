"""Have the loops of matrix products ask for what they read before they need it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lowering.stages.code.prefetch import FIRST_CACHE, SECOND_CACHE, cache_for, prefetch
from lowering.stages.code.read_next_panel import read_next_panel
from lowering.stages.ir.symbols import device_functions, symbol_of

_AHEAD_BYTES = 4096  # a page: CPUs read ahead by themselves up to its end
_LEAST_USES = 4
_PRODUCTS = frozenset({"llvm.intr.fma", "llvm.intr.fmuladd"})


def read_ahead(module: Any, features: Collection[str]) -> None:
    """Prefetch both factors where a vector of one is multiplied by many numbers of the other.

    For modules with data tiling: it has packed the factors into panels, which the innermost loop of
    a product reads from end to end, once for each tile of the result; together they do not fit the
    first cache. A C program of the same loop makes 195 GFLOP/s without, 215 with prefetches of the
    one factor, 260 with those of both (two cores of an Emerald Rapids, 128x3072x768; MKL 210).
    Where no cache has the weights, a page ahead is not too late: with 512 bytes, Mamba takes 1.1
    and ResNet-18 1.06 of the time. What is asked for beyond the end does no harm. With prefetches
    into the second cache, BERT takes 0.94 of the time on an EPYC (Zen 4), and T5 0.86. CPUs that
    are as fast without get none. Where panels are read by block after block of rows, it is the next
    panel that is asked for (`lowering.stages.code.read_next_panel`), but not on an EPYC, for which
    that was not measured.

    Before: %w = llvm.load %p : vector<16xf32>; %x = llvm.load %q : f32; 16 x llvm.intr.fmuladd
    After:  %a = llvm.getelementptr %p[4096] : i8; llvm.intr.prefetch %a; the same for %q; the same

    Args:
        module: as IREE's phase `executable-targets` leaves it, in the LLVM dialect.
        features: of the CPU that is compiled for, by LLVM's names.
    """
    if (cache := cache_for(features)) is None:
        return
    for function in device_functions(module):
        if "matmul" not in symbol_of(function):
            continue
        asking = read_next_panel(function, SECOND_CACHE) if cache == FIRST_CACHE else []
        for block in function.regions[0].blocks:
            shared = [op for op in block.operations if _is_shared_factor(op)]
            if not shared or block in asking:
                continue
            other = next((op for op in block.operations if _is_scalar_load(op)), None)
            for load in (*shared, other) if other is not None else shared:
                prefetch(load, load.operation.operands[0], _AHEAD_BYTES, cache)


def _is_shared_factor(op: Any) -> bool:
    """Say whether an op loads a vector that many multiply-adds read."""
    if not is_vector_load(op):
        return False
    uses = op.operation.results[0].uses
    return sum(use.owner.operation.name in _PRODUCTS for use in uses) >= _LEAST_USES


def is_vector_load(op: Any) -> bool:
    """Say whether an op loads a vector."""
    from iree.compiler import ir

    is_load = op.operation.name == "llvm.load"
    return is_load and isinstance(op.operation.results[0].type, ir.VectorType)


def _is_scalar_load(op: Any) -> bool:
    from iree.compiler import ir

    is_load = op.operation.name == "llvm.load"
    return is_load and isinstance(op.operation.results[0].type, ir.FloatType)

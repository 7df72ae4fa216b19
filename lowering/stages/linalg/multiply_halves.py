"""Have products of halves read these where the CPU multiplies them, or else floats."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lowering.stages.ir.barrier import put_barriers
from lowering.stages.ir.factors import HALVES, is_plain, narrow_of
from lowering.stages.ir.symbols import ops_of
from lowering.stages.ir.templates import replace_by
from lowering.stages.ir.tensors import computed

_RANKS = {"linalg.matmul": 2, "linalg.batch_matmul": 3}  # -> dimensions of a factor
# What a CPU has that multiplies halves as they are: one of these features, by LLVM's names.
_MULTIPLIED_BY: Mapping[str, frozenset[str]] = {
    "bf16": frozenset({"avx512bf16", "amx-bf16", "bf16"}),
    "f16": frozenset({"avx512f", "avx512fp16", "fullfp16"}),
}
_PRODUCT = """
func.func private @product(%a: {a}, %b: {b}, %start: {y}) -> {y} {{
  %y = {name} ins(%a, %b : {a}, {b}) outs(%start : {y}) -> {y}
  return %y : {y}
}}
"""


def multiply_halves(function: Any, features: Collection[str] | None) -> None:
    """Read both factors of a product of halves as the CPU multiplies them.

    PyTorch's `addmm` and its like widen what they are given, and IREE then makes floats of a weight
    and packs these, in each call. Packed as it is, once, it is half as large, and the CPU may have
    an instruction for it: `linear` of 64 rows in bf16, 1024 to 4096, takes 1.5 ms instead of 7.0
    (two cores of an EPYC, Zen 4). It is the same sum of the same products.

    Before: %a = linalg.generic {extf} ins(%x); %b = linalg.generic {extf} ins(%w)
            %y = linalg.matmul ins(%a, %b) outs(%start)                       all of f32
    After:  %y = linalg.matmul ins(%x, %w) outs(%start)                       %x and %w of bf16

    Where it has none, IREE computes number by number (128 rows, 512 to 1024, in 230 ms; of floats
    in 1.3), so there it is the other way round.

    Args:
        function: an entry point.
        features: of the CPU that is compiled for, by LLVM's names; None: it is none.
    """
    from iree.compiler import ir

    for op in ops_of(function):
        rank = _RANKS.get(op.name)
        if rank is None or not is_plain(op, rank):
            continue
        *factors, start = op.operands
        narrow = [narrow_of(factor) or factor for factor in factors]
        dtypes = {str(factor.type.element_type) for factor in narrow}
        if len(dtypes) > 1 or (needed := _MULTIPLIED_BY.get(dtypes.pop())) is None:
            continue
        can = features is None or not needed.isdisjoint(features)
        with ir.InsertionPoint(op), op.operation.location:
            a, b = narrow if can else map(_widened, factors)
        if [a, b] != factors:
            text = _PRODUCT.format(name=op.name, a=a.type, b=b.type, y=start.type)
            replace_by(op, text, [a, b, start])


def keep_widened(function: Any) -> None:
    """Have products read the floats that are left of halves: IREE would widen these within them."""
    for op in ops_of(function):
        if op.name in _RANKS:
            narrow = [narrow_of(factor) for factor in op.operands[:2]]
            kinds = [value and str(value.type.element_type) for value in narrow]
            put_barriers(op, [i for i, kind in enumerate(kinds) if kind in HALVES])


def _widened(factor: Any) -> Any:
    dtype = str(factor.type.element_type)
    widen = f"%y = arith.extf %x : {dtype} to f32"
    return computed(factor, "f32", widen) if dtype in HALVES else factor

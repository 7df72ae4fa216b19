"""Have products of halves read these, and not floats that were made of them."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.factors import is_plain, narrow_of
from lowering.stages.ir.symbols import ops_of
from lowering.stages.ir.templates import replace_by

_RANKS = {"linalg.matmul": 2, "linalg.batch_matmul": 3}  # -> dimensions of a factor
_HALVES = ("bf16", "f16")
_PRODUCT = """
func.func private @product(%a: {a}, %b: {b}, %start: {y}) -> {y} {{
  %y = {name} ins(%a, %b : {a}, {b}) outs(%start : {y}) -> {y}
  return %y : {y}
}}
"""


def multiply_halves(function: Any) -> None:
    """Read both factors of a product as they lie in memory, where they are of the same halves.

    PyTorch's `addmm` and its like widen what they are given, and IREE then makes floats of a weight
    and packs these, in each call. Packed as it is, once, it is half as large, and the CPU may have
    an instruction for it: `linear` of 64 rows in bf16, 1024 to 4096, takes 1.5 ms instead of 7.0
    (two cores of an EPYC, Zen 4). It is the same sum of the same products.

    Before: %a = linalg.generic {extf} ins(%x); %b = linalg.generic {extf} ins(%w)
            %y = linalg.matmul ins(%a, %b) outs(%start)                       all of f32
    After:  %y = linalg.matmul ins(%x, %w) outs(%start)                       %x and %w of bf16
    """
    for op in ops_of(function):
        rank = _RANKS.get(op.name)
        if rank is None or not is_plain(op, rank):
            continue
        *factors, start = op.operands
        a, b = (narrow_of(factor) for factor in factors)
        if a is None or b is None or a.type.element_type != b.type.element_type:
            continue
        if str(a.type.element_type) in _HALVES:
            text = _PRODUCT.format(name=op.name, a=a.type, b=b.type, y=start.type)
            replace_by(op, text, [a, b, start])

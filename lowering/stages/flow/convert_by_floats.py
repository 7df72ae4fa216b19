"""Convert whole numbers to bfloat16 by way of f32, as PyTorch does."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.symbols import walk
from lowering.stages.ir.templates import replace_by

_CONVERSIONS = ("arith.sitofp", "arith.uitofp")
_BY_FLOAT = """
func.func private @convert(%x: {kind}) -> bf16 {{
  %wide = {conversion} %x : {kind} to f32
  %bits = arith.bitcast %wide : f32 to i32
  %sixteen = arith.constant 16 : i32
  %high = arith.shrui %bits, %sixteen : i32
  %one = arith.constant 1 : i32
  %odd = arith.andi %high, %one : i32
  %below_half = arith.constant 0x7FFF : i32
  %half = arith.addi %below_half, %odd : i32
  %rounded = arith.addi %bits, %half : i32
  %upper = arith.shrui %rounded, %sixteen : i32
  %word = arith.trunci %upper : i32 to i16
  %y = arith.bitcast %word : i16 to bf16
  return %y : bf16
}}
"""


def convert_by_floats(module: Any) -> None:
    """Write conversions of integers and truths to bfloat16 in two steps, the second by its bits.

    For one step, LLVM calls a function of its runtime library on CPUs without AVX-512, which device
    programs are not linked with ("failed to link executable"); and MLIR makes one step of two.
    PyTorch rounds twice, too. No such number is a NaN.

    Before: %y = arith.sitofp %x : i64 to bf16
    After:  %0 = arith.sitofp %x : i64 to f32; %y = the upper half of %0, rounded to even

    Args:
        module: one in flow, its dispatches formed.
    Source: `c10::BFloat16`, which is made of a float, and `c10::detail::round_to_nearest_even`.
    """
    for op in [op for op in walk(module) if op.name in _CONVERSIONS]:
        if str(op.results[0].type) == "bf16":
            text = _BY_FLOAT.format(kind=op.operands[0].type, conversion=op.name)
            replace_by(op, text, [op.operands[0]])

"""Keep IREE from computing with more digits than a number of bfloat16 has."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.symbols import walk
from lowering.stages.ir.templates import put

_NARROW = "bf16"
_STORING = (".yield", ".store", ".return")  # which need no more of a number than its digits
_ROUNDED = """
func.func @rounded(%x: {narrow}) -> {narrow} {{
  %bits = arith.bitcast %x : {narrow} to {half}
  %low = arith.extui %bits : {half} to {word}
  %sixteen = arith.constant {sixteen} : {word}
  %high = arith.shli %low, %sixteen : {word}
  %y = arith.bitcast %high : {word} to {wide}
  %z = arith.truncf %y : {wide} to {narrow}
  return %z : {narrow}
}}
"""


def keep_rounding(module: Any) -> None:
    """Read what was just rounded to bfloat16 by its bits.

    IREE computes with bfloat16 in f32. Its code generator marks arithmetic as `contract`, and MLIR
    then takes a number that is rounded and widened again for the number itself:
    `torch.exp(x.bfloat16().float())` was off by 1.5 %, and so was `x.bfloat16() * y.bfloat16()`. A
    bfloat16 is the upper half of a float32; what is taken for the number itself is then that one.

    Before: %1 = arith.truncf %0 : f32 to bf16; %2 = arith.mulf %1, %1 : bf16
    After:  %1 = arith.truncf %0 : f32 to bf16; %bits = arith.bitcast %1 : bf16 to i16
            %high = arith.shli (arith.extui %bits), 16 : i32; %y = arith.bitcast %high : i32 to f32
            %z = arith.truncf %y : f32 to bf16; %2 = arith.mulf %z, %z : bf16

    Args:
        module: one in flow, its dispatches formed.
    """
    for op in list(walk(module)):
        if op.name == "arith.truncf" and str(op.results[0].type).endswith((_NARROW, f"{_NARROW}>")):
            _keep(op.results[0])


def _keep(number: Any) -> None:
    from iree.compiler import ir

    readers = [use for use in number.uses if not use.owner.name.endswith(_STORING)]
    if not readers:
        return
    half, word, wide = (str(number.type).replace(_NARROW, d) for d in ("i16", "i32", "f32"))
    sixteen = "16" if word == "i32" else "dense<16>"
    text = _ROUNDED.format(narrow=number.type, half=half, word=word, wide=wide, sixteen=sixteen)
    with ir.InsertionPoint.after(number.owner), number.owner.location:
        (rounded,) = put(text, [number])
    for use in readers:
        use.owner.operands[use.operand_number] = rounded

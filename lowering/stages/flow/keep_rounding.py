"""Keep IREE from computing with more digits than a number of bfloat16 has."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.symbols import maker_of, walk
from lowering.stages.ir.templates import replace_by

_NARROW = "bf16"
_WIDE = """
func.func @wide(%x: {narrow}) -> {result} {{
  %bits = arith.bitcast %x : {narrow} to {half}
  %low = arith.extui %bits : {half} to {word}
  %sixteen = arith.constant {sixteen} : {word}
  %high = arith.shli %low, %sixteen : {word}
  %y = arith.bitcast %high : {word} to {wide}
  {more}
  return {last} : {result}
}}
"""


def keep_rounding(module: Any) -> None:
    """Widen what was just rounded to bfloat16 by its bits.

    IREE's code generator marks arithmetic as `contract`, and MLIR then takes a number that is
    rounded and widened again for the number itself: `torch.exp(x.bfloat16().float())` was off by
    1.5 %. A bfloat16 is the upper half of a float32.

    Before: %1 = arith.truncf %0 : f32 to bf16; %2 = arith.extf %1 : bf16 to f32
    After:  %1 = arith.truncf %0 : f32 to bf16; %bits = arith.bitcast %1 : bf16 to i16
            %high = arith.shli (arith.extui %bits), 16 : i32; %2 = arith.bitcast %high : i32 to f32

    Args:
        module: one in flow, its dispatches formed.
    """
    for op in list(walk(module)):
        if op.name == "arith.extf" and maker_of(op.operands[0]) == "arith.truncf":
            narrow, result = str(op.operands[0].type), str(op.results[0].type)
            if narrow.endswith((_NARROW, f"{_NARROW}>")):
                _widen(op, narrow, result)


def _widen(op: Any, narrow: str, result: str) -> None:
    half, word, wide = (narrow.replace(_NARROW, dtype) for dtype in ("i16", "i32", "f32"))
    is_wider = result != wide
    replace_by(
        op,
        _WIDE.format(
            narrow=narrow,
            half=half,
            word=word,
            wide=wide,
            result=result,
            sixteen="16" if word == "i32" else "dense<16>",
            more=f"%wider = arith.extf %y : {wide} to {result}" if is_wider else "",
            last="%wider" if is_wider else "%y",
        ),
        [op.operands[0]],
    )

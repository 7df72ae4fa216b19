"""Keep IREE from taking one size of what it packs for another."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.barrier import behind_barrier
from lowering.stages.ir.symbols import walk
from lowering.stages.ir.types import sizes_of


def tell_sizes_apart(module: Any) -> None:
    """Make the dynamic sizes of each tensor that is packed by itself values of their own.

    Of sizes that are one value, IREE's packing program (`iree-stream-materialize-encodings`) takes
    all but one for the tensor's first size when it counts its work items. Of 8 matrices of
    136 x 136, as attention's, it packed some columns; the others were what the memory held. Two
    values may become one after this, so all are told apart, but where the mistake is none.

    Before: %1 = flow.tensor.encode %0 : tensor<?x?x?xf32>{%b, %m, %m} -> ...{%b, %m, %m}
    After:  %n = util.optimization_barrier %m; %k = util.optimization_barrier %m
            %1 = flow.tensor.encode %0 : tensor<?x?x?xf32>{%b, %n, %k} -> ...{%b, %n, %k}

    Args:
        module: one in flow, its dispatches formed.
    """
    from iree.compiler import ir

    for op in [op for op in walk(module) if op.name == "flow.tensor.encode"]:
        count = sizes_of(op.operands[0].type).count(None)
        for place in range(1, count if count > 2 else 0):
            with op.location, ir.InsertionPoint(op):
                size = behind_barrier(op.operands[1 + place])
            op.operands[1 + place] = op.operands[1 + count + place] = size

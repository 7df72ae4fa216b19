"""Keep IREE from writing columns straight into what they are put together to."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.barrier import behind_barrier
from lowering.stages.ir.structured import dim_of
from lowering.stages.ir.symbols import ops_of
from lowering.stages.ir.types import sizes_of


def separate_pieces(function: Any) -> None:
    """Put a barrier before a concatenation, at pieces that are one element thick.

    IREE lets such a piece's op write into the result in place. In a long chain of products and
    updates (the gradient of `ormqr`) some of the pieces are overwritten later, at every
    optimization level; which of its passes does so is not known. Where slices are updated, the
    barriers stay until buffers are assigned: it is then that the pieces are overwritten. Thicker
    pieces, as attention and rotary embeddings have them, are not touched: no wrong one was seen.

    Before: %0 = tensor.concat dim(1) %a, %b : (tensor<5x1xf32>, tensor<5x1xf32>)
    After:  %c = util.optimization_barrier %a; %d = util.optimization_barrier %b
            %0 = tensor.concat dim(1) %c, %d
    """
    from iree.compiler import ir

    ops = ops_of(function)
    has_updates = any(op.name == "tensor.insert_slice" for op in ops)
    for op in ops:
        if op.name != "tensor.concat":
            continue
        with ir.InsertionPoint(op):
            for i, piece in enumerate(list(op.operands)):
                if sizes_of(piece.type)[dim_of(op)] == 1:
                    op.operands[i] = behind_barrier(piece, stays=has_updates)

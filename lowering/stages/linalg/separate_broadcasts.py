"""Keep IREE from fusing rows that are all alike into the product that they are a factor of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lowering.stages.ir.barrier import read_behind_barrier
from lowering.stages.ir.structured import repeated_dims
from lowering.stages.ir.symbols import ops_of

_COLLAPSE = "tensor.collapse_shape"
_CONVOLUTION = "linalg.conv_"


def separate_broadcasts(function: Any) -> None:
    """Put a barrier behind what repeats a value, where it makes all rows of a product.

    IREE then has the product read one row, in a loop that neither factor has, and dies (SIGSEGV)
    when it lays out the factors: `F.linear(x.expand(n, k), w)`, in cross attention on one token.

    Before: %x = linalg.generic {(d0, d1) -> (d1)} ins(%row) outs(%e); %y = linalg.matmul(%x, %w)
    After:  the same with %b = util.optimization_barrier %x; %y = linalg.matmul(%b, %w)
    """
    for op in ops_of(function):
        repeated = repeated_dims(op)
        if any(rows <= repeated for rows in _rows_made_of(op, repeated)):
            read_behind_barrier(op.results[0])


def _rows_made_of(op: Any, repeated: set[int]) -> Iterator[set[int]]:
    """Find which dimensions of an op's result are the rows, or places, of products and images."""
    if not repeated:
        return
    rank = len(op.results[0].type.shape)
    for use in op.results[0].uses:
        user = use.owner.operation
        if user.name == "linalg.matmul" and use.operand_number == 0:
            yield {0}
        elif user.name.startswith(_CONVOLUTION) and use.operand_number == 0:
            yield set(range(2, rank))
        elif user.name == _COLLAPSE:
            rows = {d.value for d in user.attributes["reassociation"][0]}
            readers = [(u.owner.operation.name, u.operand_number) for u in user.results[0].uses]
            if ("linalg.matmul", 0) in readers:
                yield {d for d in rows if op.results[0].type.shape[d] != 1}

"""Keep IREE from packing what a reduction leaves for the batched product that is divided by it."""

from __future__ import annotations

from typing import Any

from lowering.stages.barrier import behind_barrier
from lowering.stages.structured import RESHAPES, inputs_of, is_elementwise


def separate_sums(function: Any) -> None:
    """Put a barrier behind a reduction whose rows divide those of batched products of any size.

    With data tiling, IREE packs the sums in the program that computes them, and reads them as if
    they were not padded: attention over 17 keys was wrong where the batch was of any size.

    Before: %p = linalg.batch_matmul; %s = linalg.generic {reduction}
            %0 = linalg.generic {(d0, d1, d2), (d0, d1)} ins(%p, %s)
    After:  the same with %b = util.optimization_barrier %s in the place of %s
    """
    from iree.compiler import ir

    for op in list(function.regions[0].blocks[0].operations):
        if not is_elementwise(op):
            continue
        made_of = [_made_of(value) for value in inputs_of(op)]
        if not any(_is_product_of_any_size(made) for ops in made_of for made in ops):
            continue
        for i, ops in enumerate(made_of):
            if any(map(_reduces, ops)) and not any(map(_is_product_of_any_size, ops)):
                with ir.InsertionPoint(op):
                    op.operation.operands[i] = behind_barrier(op.operands[i])


def _made_of(value: Any) -> set[Any]:
    """Find the ops that are no views and not elementwise, from which others lead to a value."""
    from iree.compiler import ir

    found, seen, values = set[Any](), set[Any](), [value]
    while values:
        owner = values.pop().owner
        if isinstance(owner, ir.Block) or owner.operation in seen:
            continue
        op = owner.operation
        seen.add(op)
        if op.name in RESHAPES:
            values.append(op.operands[0])
        elif is_elementwise(op):
            values += inputs_of(op)
        else:
            found.add(op)
    return found


def _reduces(op: Any) -> bool:
    return op.name == "linalg.generic" and not is_elementwise(op)


def _is_product_of_any_size(op: Any) -> bool:
    from iree.compiler import ir

    if not op.name.startswith("linalg.") or op.name in ("linalg.generic", "linalg.fill"):
        return False
    kind = ir.RankedTensorType(op.results[0].type)
    return kind.rank > 2 and not kind.has_static_shape

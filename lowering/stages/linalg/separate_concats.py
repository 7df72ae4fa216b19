"""Keep IREE from making two concatenations that begin alike in one buffer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from lowering.stages.ir.structured import dim_of, is_of_nothing
from lowering.stages.ir.symbols import maker_of, ops_of, origin_of
from lowering.stages.ir.tensors import index_of, size_of
from lowering.stages.ir.types import sizes_of


def separate_concats(function: Any) -> None:
    """Write the pieces of concatenations in other orders, where the same piece comes first.

    IREE writes piece by piece, and finds that two results have their first steps in common. They
    are copied then where they part; yet where the next piece is one of several results of a device
    program, that program writes it in place, before the copy is made, which IREE drops: both
    results are one buffer (its passes `EmplaceAllocations` and `ElideAsyncCopies`). Of different
    first steps, nothing is shared. It is so for pieces that lie together in the result.

    Before: %0 = tensor.concat dim(0) %a, %b; %1 = tensor.concat dim(0) %a, %c
    After:  %0 = tensor.concat dim(0) %a, %b
            %e = tensor.empty; %i = tensor.insert_slice %c into %e[5] [5] [1]
            %1 = tensor.insert_slice %a into %i[0] [5] [1]
    """
    alike: dict[Any, list[Any]] = defaultdict(list)
    for op in ops_of(function):
        if op.name == "tensor.concat" and _is_of_whole_parts(op):
            alike[op.results[0].type].append(op)
    for ops in alike.values():
        firsts: set[tuple[int, Any]] = set()
        for op in ops:
            # What is first in another place is another first step.
            steps = list(enumerate(map(_what, op.operands)))
            first = next((step for step in steps if step not in firsts), steps[0])
            firsts.add(first)
            if first[0]:
                _write_from(op, first[0])


def _what(piece: Any) -> Any:
    """Name a tensor, as it is once barriers are gone; those of numbers are alike in their type."""
    piece = origin_of(piece, ("util.optimization_barrier", "flow.tensor.tie_shape"))
    maker = maker_of(piece)
    is_number = maker == "arith.constant" or (maker and is_of_nothing(piece.owner))
    return str(piece.type) if is_number else hash(piece)


def _is_of_whole_parts(op: Any) -> bool:
    """Say whether each piece is in one part of the result's memory, as far as is known."""
    return all(size == 1 for size in sizes_of(op.results[0].type)[: dim_of(op)])


def _write_from(op: Any, start: int) -> None:
    """Replace a concatenation by updates of its result, from this piece on and round."""
    from iree.compiler import ir

    kind, dim, pieces = op.results[0].type, dim_of(op), list(op.operands)
    with op.location, ir.InsertionPoint(op):
        sizes = [_sizes(piece) for piece in pieces]
        offsets: list[Any] = [0]
        for piece in sizes:
            offsets.append(_sum(offsets[-1], piece[dim]))
        whole = [*sizes[0][:dim], offsets.pop(), *sizes[0][dim + 1 :]]
        dynamic = [size for size in whole if not isinstance(size, int)]
        made = ir.Operation.create("tensor.empty", results=[kind], operands=dynamic).result
        for i in (*range(start, len(pieces)), *range(start)):
            place = [offsets[i] if d == dim else 0 for d in range(len(whole))]
            made = _updated(made, pieces[i], place, sizes[i])
    op.results[0].replace_all_uses_with(made)
    op.erase()


def _updated(whole: Any, piece: Any, offsets: list[Any], sizes: list[Any]) -> Any:
    from iree.compiler import ir

    unknown = ir.ShapedType.get_dynamic_size()
    numbers = {"offsets": offsets, "sizes": sizes, "strides": [1] * len(sizes)}
    dynamic = [[v for v in values if not isinstance(v, int)] for values in numbers.values()]
    attributes = {
        f"static_{name}": ir.DenseI64ArrayAttr.get(
            [v if isinstance(v, int) else unknown for v in values]
        )
        for name, values in numbers.items()
    }
    attributes["operandSegmentSizes"] = ir.DenseI32ArrayAttr.get([1, 1, *map(len, dynamic)])
    return ir.Operation.create(
        "tensor.insert_slice",
        results=[whole.type],
        operands=[piece, whole, *(v for values in dynamic for v in values)],
        attributes=attributes,
    ).result


def _sizes(piece: Any) -> list[Any]:
    """Give the sizes of a tensor at the insertion point: numbers, or values."""
    known = enumerate(sizes_of(piece.type))
    return [size_of(piece, d) if size is None else size for d, size in known]


def _sum(a: Any, b: Any) -> Any:
    from iree.compiler import ir

    if isinstance(a, int) and isinstance(b, int):
        return a + b
    values = [index_of(v) if isinstance(v, int) else v for v in (a, b)]
    return ir.Operation.create("arith.addi", results=[ir.IndexType.get()], operands=values).result

"""Keep IREE from fusing what an op reads along two axes, or along its diagonal, into the op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from lowering.stages.ir.barrier import behind_barrier
from lowering.stages.ir.structured import (
    inputs_of,
    is_elementwise,
    loop_of_index,
    loops_of,
    maps_of,
)
from lowering.stages.ir.symbols import maker_of, ops_of, origin_of

# Where a dimension of a reduction's result is in a value made from it: a dimension of the value,
# and what happened to it on the way (slices, splits); None if it is gone.
_Place: TypeAlias = tuple[int, tuple[str, ...]] | None
# Reduction -> the places of its dimensions.
_Reads: TypeAlias = Mapping[Any, tuple[_Place, ...]]


def separate_reads(function: Any) -> None:
    """Put a barrier between a reduction and an op that reads it along two axes, and at diagonals.

    IREE fuses the two although no one loop serves both reads: `s[:, None] - s[None]` with
    `s = x.sum(1)` would be zeros, and `p - p.mT` with `p = softmax(...)` is wrong, too, as is what
    is read by the loops themselves, `p + p.diagonal()`. To read a value and a reduction of it along
    the same axes, as softmax does, is right and stays fused. Of a value that is read along its
    diagonal and otherwise, too, IREE stores the diagonal alone.

    Before: %s = linalg.generic {reduction}; %a = expand_shape %s; %b = expand_shape %s
            %0 = linalg.generic {(d0, 0), (0, d1)} ins(%a, %b)
    After:  the same with %c = util.optimization_barrier %s; %b = expand_shape %c
    """
    reads: dict[Any, _Reads] = {}
    for op in ops_of(function):
        name = op.name
        if name in _VIEWS:
            places = _VIEWS[name](op)
            reads[op.results[0]] = _moved(reads.get(op.operands[0], {}), places)
        elif name == "linalg.generic":
            _visit_generic(op, reads)
        elif name.startswith("linalg.") and name != "linalg.fill":  # a contraction
            for result in op.results:
                reads[result] = {op: _all_of(_rank(result))}


def _visit_generic(op: Any, reads: dict[Any, _Reads]) -> None:
    from iree.compiler import ir

    maps = maps_of(op)
    inputs, reduces = inputs_of(op), not is_elementwise(op)
    found: dict[Any, tuple[_Place, ...]] = {}
    operands = [(op.operation, i, _to_loops(maps[i])) for i in range(len(inputs))]
    for reader, i, loops in operands + _read_by_index(op):
        operand = reader.operands[i]
        read = _moved(reads.get(operand, {}), loops)
        in_conflict = any(_conflict(found.get(root), way) for root, way in read.items())
        if (in_conflict and not reduces) or _is_diagonal(operand, loops):
            with ir.InsertionPoint(op):
                reader.operands[i] = _behind_barrier(operand)
            continue
        for root, way in read.items():
            old = found.get(root, way)
            found[root] = tuple(a or b for a, b in zip(old, way, strict=True))
    for result, out in zip(op.results, maps[len(inputs) :], strict=True):
        reads[result] = dict(_moved(found, _from_loops(out)))
        if reduces:
            reads[result] = {**reads[result], op.operation: _all_of(_rank(result))}


def _read_by_index(op: Any) -> list[tuple[Any, int, list[_Place]]]:
    """Find what an op's body reads along its loops (`x[d0, d0]`), which IREE takes for operands.

    Returns:
        For each the op in the body, the place of its operand, and the loop of each dimension.
    """
    return [
        (inner, 0, [_loop(index) for index in list(inner.operands)[1:]])
        for inner in ops_of(op)
        if inner.name == "tensor.extract"
    ]


def _is_diagonal(value: Any, loops: Sequence[_Place]) -> bool:
    """Say whether one loop reads two axes of a computed value that is read otherwise, too."""
    known = [loop for loop in loops if loop is not None]
    is_shared = sum(1 for _ in value.uses) > 1
    return len({*known}) < len(known) and is_shared and maker_of(value) != ""


def _loop(index: Any) -> _Place:
    loop = loop_of_index(origin_of(index, ("arith.index_cast",)))
    return None if loop is None else (loop, ())


def _conflict(one: tuple[_Place, ...] | None, other: tuple[_Place, ...]) -> bool:
    """Say whether two reads have the same dimension in different places."""
    if one is None:
        return False
    return any(a is not None and b is not None and a != b for a, b in zip(one, other, strict=True))


def _moved(reads: _Reads, places: Sequence[_Place]) -> _Reads:
    """Follow dimensions through an op: `places[d]` is where dimension `d` of its operand goes."""

    def move(place: _Place) -> _Place:
        if place is None or (target := places[place[0]]) is None:
            return None
        return target[0], (*place[1], *target[1])

    return {root: tuple(map(move, way)) for root, way in reads.items()}


def _behind_barrier(value: Any) -> Any:
    """Give the value again, behind a barrier that stands before its views (IREE asks for that)."""
    if maker_of(value) not in _VIEWS:
        return behind_barrier(value)
    source = _behind_barrier(value.owner.operands[0])
    view = value.owner.operation.clone()
    view.operands[0] = source
    return view.results[0]


def _to_loops(indexing: Any) -> list[_Place]:
    return [None if loop is None else (loop, ()) for loop in loops_of(indexing)]


def _from_loops(indexing: Any) -> list[_Place]:
    loops = loops_of(indexing)
    return [(loops.index(i), ()) if i in loops else None for i in range(indexing.n_dims)]


def _cast(op: Any) -> Sequence[_Place]:
    return _all_of(_rank(op.results[0]))


def _transpose(op: Any) -> list[_Place]:
    order = _numbers(op.attributes["permutation"])
    return [(order.index(d), ()) for d in range(len(order))]


def _expand(op: Any) -> list[_Place]:
    """A dimension goes to the one of its group that is not 1; if there are more, it is split."""
    shape = op.results[0].type.shape
    places: list[_Place] = []
    for group in op.attributes["reassociation"]:
        dims = _numbers(group)
        large = [d for d in dims if shape[d] != 1] or dims[:1]
        split = (f"split {[shape[d] for d in large]}",) if len(large) > 1 else ()
        places.append((large[0], split))
    return places


def _collapse(op: Any) -> list[_Place]:
    shape = op.operands[0].type.shape
    places: dict[int, _Place] = {}
    for target, group in enumerate(op.attributes["reassociation"]):
        dims = _numbers(group)
        large = [d for d in dims if shape[d] != 1]
        for d in dims:
            merged = (f"part {large.index(d)} of {len(large)}",) if d in large[1:] else ()
            places[d] = (target, merged)
    return [places.get(d) for d in range(_rank(op.operands[0]))]  # of one element, none is left


def _slice(op: Any) -> Sequence[_Place]:
    rank = _rank(op.operands[0])
    if _rank(op.results[0]) != rank:
        return [None] * rank
    offsets, strides = (_numbers(op.attributes[f"static_{n}"]) for n in ("offsets", "strides"))
    return [
        (d, () if (offset, stride) == (0, 1) else (f"from {offset} by {stride}",))
        for d, (offset, stride) in enumerate(zip(offsets, strides, strict=True))
    ]


_VIEWS: dict[str, Callable[[Any], Sequence[_Place]]] = {
    "linalg.transpose": _transpose,
    "tensor.cast": _cast,
    "tensor.collapse_shape": _collapse,
    "tensor.expand_shape": _expand,
    "tensor.extract_slice": _slice,
}


def _all_of(rank: int) -> tuple[_Place, ...]:
    return tuple((d, ()) for d in range(rank))


def _rank(value: Any) -> int:
    return len(value.type.shape)


def _numbers(attribute: Any) -> list[int]:
    return [int(getattr(n, "value", n)) for n in attribute]

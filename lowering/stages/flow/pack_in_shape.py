"""Have what is packed computed in the shape in which it is packed, not as one long row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from lowering.stages.ir.device_programs import (
    EXECUTABLE,
    LOAD,
    RESHAPE,
    argument_type,
    dispatches_of,
    functions_of,
    is_whole,
    place_of,
    reshaped,
    set_type,
)
from lowering.stages.ir.structured import is_elementwise, loops_of, maps_of
from lowering.stages.ir.symbols import inside, maker_of, ops_of
from lowering.stages.ir.types import sizes_of

_PACKS, _SPLITS = "iree_encoding.set_encoding", "tensor.expand_shape"
_READS = "!iree_tensor_ext.dispatch.tensor<readonly:"
_COMPUTES = ("arith.", "math.", "linalg.yield")


def pack_in_shape(module: Any) -> None:
    """Undo that IREE computes number by number in one long loop, where the result is packed.

    Where a number goes is then found by dividing its place in the loop by the lengths of rows, for
    each number by itself where these are odd: to square and pack two images of 201 rows of 300 took
    0.55 ms, and takes 0.08 (two cores, AVX2).

    Before: flow.executable @a: %1 = linalg.generic of tensor<120600xf32>
                                %2 = tensor.expand_shape %1 [[0, 1, 2]] output_shape [2, 201, 300]
                                store(set_encoding %2)
            %3 = flow.tensor.reshape %x : tensor<2x201x300xf32> -> tensor<120600xf32>
            %4 = flow.dispatch @a::@a(%3) : ... -> tensor<2x201x300xf32, #encoding>
    After:  flow.executable @a: %1 = linalg.generic of tensor<2x201x300xf32>
                                store(set_encoding %1)
            %4 = flow.dispatch @a::@a(%x) : ... -> tensor<2x201x300xf32, #encoding>

    Of unknown sizes, and where more is computed before, it stays as it is.

    Args:
        module: one in flow, its dispatches formed.
    """
    for executable in inside(module, EXECUTABLE):
        functions = functions_of(executable)
        ops = ops_of(functions[0]) if len(functions) == 1 else []
        packed = [op.operands[0] for op in ops if op.name == _PACKS]
        for split in [value.owner for value in packed if maker_of(value) == _SPLITS]:
            parts = _parts_of(split)
            shapes = None if parts is None else _shapes_around(split, parts)
            if parts is not None and shapes is not None:
                _split_loops(split.operands[0].owner, parts)
                _write(split, shapes, functions[0], dispatches_of(module, executable))


def _shapes_around(split: Any, parts: Sequence[Sequence[int]]) -> dict[Any, list[int]] | None:
    """Return the new shapes of what computes a split, and of what that reads.

    None: it reads what is not in memory in that shape.

    Args:
        split: what gives a shape to what is computed in one row.
        parts: what each loop becomes.
    """
    op, shapes = split.operands[0].owner, dict[Any, list[int]]()
    values = [*op.operands, *op.results]
    for value, read in zip(values, [*maps_of(op), maps_of(op)[-1]], strict=True):
        loops = loops_of(read)
        if None in loops:
            return None
        shape = list(chain.from_iterable(parts[loop] for loop in loops if loop is not None))
        if len(shape) > len(loops) and shapes.setdefault(value, shape) != shape:
            return None
    return shapes if all(_may_change(value, split) for value in shapes) else None


def _parts_of(split: Any) -> list[list[int]] | None:
    """Return what each loop of what is split becomes; None if that is not number by number."""
    source, sizes = split.operands[0], sizes_of(split.results[0].type)
    if maker_of(source) != "linalg.generic" or None in sizes:
        return None
    op = source.owner
    made, loops = maps_of(op)[-1], loops_of(maps_of(op)[-1])
    is_plain = all(inner.name.startswith(_COMPUTES) for inner in ops_of(op))
    if not (is_plain and is_elementwise(op) and len(op.results) == 1):
        return None
    if {*loops} != {*range(made.n_dims)}:
        return None
    groups = [[sizes[d.value] for d in group] for group in split.attributes["reassociation"]]
    return [groups[loops.index(loop)] for loop in range(made.n_dims)]


def _may_change(value: Any, split: Any) -> bool:
    """Say whether a tensor may get another shape: it is read whole, and for nothing else."""
    op = split.operands[0].owner
    users = [use.owner.operation for use in value.uses]
    if value == split.operands[0]:
        return users == [split]
    if any(user != op for user in users):
        return False
    return maker_of(value) == "tensor.empty" or (
        maker_of(value) == LOAD
        and is_whole(value.owner)
        and str(value.owner.operands[0].type).startswith(_READS)
        and len(list(value.owner.operands[0].uses)) == 1
    )


def _write(
    split: Any, shapes: Mapping[Any, Sequence[int]], function: Any, dispatches: Sequence[Any]
) -> None:
    """Compute what is split in its new shape, from tensors that are given in theirs."""
    for value, shape in shapes.items():
        kind = _in_shape(value.type, shape)
        value.set_type(kind)
        if maker_of(value) == LOAD:
            argument = _load_whole(value.owner, kind)
            for dispatch in dispatches:
                _give(dispatch, place_of(dispatch, argument), kind)
    split.results[0].replace_all_uses_with(split.operands[0])
    split.erase()
    set_type(function)


def _split_loops(op: Any, parts: Sequence[Sequence[int]]) -> None:
    """Give an op several loops in the place of each, along the same dimensions of its tensors."""
    from iree.compiler import ir

    count = sum(map(len, parts))
    numbers = iter(range(count))
    loops = [[ir.AffineDimExpr.get(next(numbers)) for _ in of_loop] for of_loop in parts]
    maps = [
        ir.AffineMap.get(count, 0, [d for loop in loops_of(read) for d in loops[loop or 0]])
        for read in maps_of(op)
    ]
    op.attributes["indexing_maps"] = ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in maps])
    kinds = [*op.attributes["iterator_types"]][:1] * count
    op.attributes["iterator_types"] = ir.ArrayAttr.get(kinds)


def _in_shape(kind: Any, shape: Sequence[int]) -> Any:
    from iree.compiler import ir

    return ir.RankedTensorType.get(list(shape), ir.RankedTensorType(kind).element_type)


def _load_whole(load: Any, kind: Any) -> Any:
    """Have a load be of all of an argument, in a new shape; return the argument."""
    from iree.compiler import ir

    argument = load.operands[0]
    argument.set_type(argument_type("readonly", kind))
    for name, number in ("offsets", 0), ("strides", 1):
        load.attributes[f"static_{name}"] = ir.DenseI64ArrayAttr.get([number] * len(kind.shape))
    load.attributes["static_sizes"] = ir.DenseI64ArrayAttr.get(kind.shape)
    return argument


def _give(dispatch: Any, place: int, kind: Any) -> None:
    """Give a program a tensor in a new shape."""
    from iree.compiler import ir

    given = dispatch.operands[place]
    if maker_of(given) == RESHAPE and given.owner.operands[0].type == kind:
        dispatch.operands[place] = given.owner.operands[0]
        if not any(True for _ in given.uses):
            given.owner.erase()
        return
    with ir.InsertionPoint(dispatch), dispatch.location:
        dispatch.operands[place], _ = reshaped((given, ()), (kind, ()))

"""Keep IREE from fusing a slice into an op that reads it in a way that it cannot lower."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.barrier import read_behind_barrier
from lowering.stages.ir.factors import is_weight
from lowering.stages.ir.structured import RESHAPES, VIEWS, makes_factor
from lowering.stages.ir.symbols import ops_of


def separate_slices(function: Any) -> None:
    """Make a slice a copy, if its rows have gaps and something reads it by index, or cut anywhere.

    IREE's code generator does not lower an element read at a computed place of such a slice
    ("LLVM Translation failed for operation: builtin.unrealized_conversion_cast"): `x[:, ::2]` or
    `x[..., 0]`, flipped, gathered or indexed. Nor does it distribute a program that merges the
    dimensions of rows cut at a computed place ("write affecting operations on global resources are
    restricted to workgroup distributed contexts"): `x[:, 1:] - x[:, :-1]` of any length; or of rows
    with others between them, from a computed place on, such as `x[1::2]` where it is not known that
    there is a second.

    A slice that is a factor of a product is a copy, too, if it is of dynamic sizes or none of its
    numbers are next to each other: IREE packs it where it multiplies, on a stack that has no end
    ("stack allocation size overflows 64 bits"), or is too small. Parameters it packs at load.

    One that is sorted where it lies is a copy: what makes all of it, another sort or a scan, is not
    distributed with it (the largest three of the largest five).

    Before: %0 = tensor.extract_slice %x[0, 0] [8, 8] [1, 2]
            %1 = linalg.generic {%e = tensor.extract %0[%i, %j]}
    After:  the same with %b = util.optimization_barrier %0; %e = tensor.extract %b[%i, %j]
    """
    for op in ops_of(function):
        if op.name != "tensor.extract_slice":
            continue
        is_misread = _has_gaps(op) and _is_indexed(op.result)
        is_packed_there = not op.result.type.has_static_shape or (
            _is_scattered(op) and not is_weight(op.result, through=VIEWS)
        )
        is_factor = is_packed_there and makes_factor(op.result)
        if is_misread or is_factor or _is_cut_anywhere(op) or _is_sorted(op.result):
            read_behind_barrier(op.result)


def _is_sorted(piece: Any) -> bool:
    return any(use.owner.operation.name == "tm_tensor.sort" for use in piece.uses)


def _has_gaps(piece: Any) -> bool:
    """Say whether numbers that follow each other in the slice do not in what it is cut from."""
    source, shape = piece.operands[0].type.shape, piece.result.type.shape
    return len(shape) != len(source) or _is_scattered(piece)


def _is_scattered(piece: Any) -> bool:
    """Say whether no two numbers of the slice are next to each other in what it is cut from."""
    source, sizes = piece.operands[0].type.shape, list(piece.attributes["static_sizes"])
    inner = max((d for d, size in enumerate(sizes) if size != 1), default=len(sizes))
    strides = list(piece.attributes["static_strides"])
    return strides[inner : inner + 1] not in ([], [1]) or any(n != 1 for n in source[inner + 1 :])


def _is_cut_anywhere(piece: Any) -> bool:
    """Say whether rows are cut at a computed place, and have gaps, or gaps that are not known."""
    from iree.compiler import ir

    dynamic = ir.ShapedType.get_dynamic_stride_or_offset()
    source, offsets = piece.operands[0].type.shape, list(piece.attributes["static_offsets"])
    strides = list(piece.attributes["static_strides"])
    return any(
        offset == dynamic and (strides[dim] != 1 or any(size != 1 for size in source[:dim]))
        for dim, offset in enumerate(offsets)
    )


def _is_indexed(value: Any) -> bool:
    users = [use.owner.operation for use in value.uses]
    return any(
        user.name == "tensor.extract" or (user.name in RESHAPES and _is_indexed(user.results[0]))
        for user in users
    )

"""What the factors of matrix products are: as they lie, transposed, widened, weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lowering.stages.ir.structured import RESHAPES, is_elementwise, maps_of
from lowering.stages.ir.symbols import maker_of, ops_of, origin_of

HALVES = ("bf16", "f16")
# What makes a float32 of a number of fewer bits, such as a quantized weight is of.
TO_FLOAT = {"i8": "arith.sitofp"} | dict.fromkeys(HALVES, "arith.extf")
_WIDENS = frozenset({"arith.extsi", *TO_FLOAT.values()})


def shapes_of(op: Any, *, narrow_at: int | None = None) -> list[list[int]] | None:
    """Return the shapes of an op's operands; None if one has dynamic sizes, or another dtype.

    Args:
        op: a product.
        narrow_at: the place of an operand that may be of fewer bits, and not of float32.
    """
    from iree.compiler import ir

    kinds = [ir.RankedTensorType(operand.type) for operand in op.operands]
    taken = [("f32", *TO_FLOAT) if i == narrow_at else ("f32",) for i, _ in enumerate(kinds)]
    is_known = all(
        str(k.element_type) in dtypes and k.has_static_shape
        for k, dtypes in zip(kinds, taken, strict=True)
    )
    return [list(kind.shape) for kind in kinds] if is_known else None


def is_plain(op: Any, rank: int) -> bool:
    """Say whether a product is of matrices as they are: such an op may have maps of its own."""
    from iree.compiler import ir

    if "indexing_maps" not in op.attributes:
        return True
    stack = [ir.AffineDimExpr.get(0)] if rank == 3 else []
    m, n, k = (ir.AffineDimExpr.get(d) for d in range(len(stack), len(stack) + 3))
    plain = ([*stack, m, k], [*stack, k, n], [*stack, m, n])
    maps = maps_of(op)
    return all(list(a.results) == b for a, b in zip(maps, plain, strict=True))


def transposed(value: Any, rank: int) -> Any:
    """Return what a value has the last two dimensions of the other way round; None: of nothing."""
    if maker_of(value) != "linalg.transpose":
        return None
    order = [*range(rank - 2), rank - 1, rank - 2]
    is_swap = list(value.owner.attributes["permutation"]) == order
    return value.owner.operands[0] if is_swap else None


def narrow_of(value: Any) -> Any:
    """Return what a value has all the numbers of, in a dtype of fewer bits; None: of nothing."""
    if maker_of(value) != "linalg.generic" or not is_elementwise(op := value.owner):
        return None
    maps = maps_of(op)
    first, *others = ops_of(op)
    is_cast = first.name in _WIDENS and len(others) == 1 and len(maps) == 2
    return op.operands[0] if is_cast and all(m == maps[-1] for m in maps) else None


def narrow_factor(value: Any) -> Any:
    """Return what a factor has all the numbers of as floats, in a dtype of `TO_FLOAT`; or None."""
    source = narrow_of(value)
    return source if source is not None and str(source.type.element_type) in TO_FLOAT else None


def as_float(name: str, dtype: str) -> tuple[str, str]:
    """Write what makes a float32 of a value, `%name`, of a factor: the op, if any, and its name."""
    widens = f"%wide = {TO_FLOAT[dtype]} %{name} : {dtype} to f32" if dtype in TO_FLOAT else ""
    return widens, "wide" if widens else name


def is_weight(value: Any, through: Collection[str] = RESHAPES) -> bool:
    """Say whether a value is a parameter, in any shape; or a part of one, `through` slices."""
    return maker_of(origin_of(value, through)) == "util.global.load"

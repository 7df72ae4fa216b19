"""What a structured op (of linalg or tm_tensor) reads, and whether it computes number by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowering.stages.ir.symbols import constant_of, maker_of, ops_of
from lowering.stages.ir.types import is_tensor

# Ops whose result is the numbers of their first operand, in the same order.
RESHAPES = frozenset({"tensor.cast", "tensor.collapse_shape", "tensor.expand_shape"})
# ... or some of them.
VIEWS = RESHAPES | {"tensor.extract_slice"}
_PASSES_ON = RESHAPES | {"linalg.transpose"}
# Ops that multiply matrices, whose factors and results data tiling packs.
PRODUCTS = frozenset({"linalg.matmul", "linalg.batch_matmul"})


def inputs_of(op: Any) -> list[Any]:
    """Return what an op reads, without what its results start from: an operand for each result."""
    return list(op.operands)[: len(op.operands) - len(op.results)]


def maps_of(op: Any) -> list[Any]:
    """Return the indexing maps of an op: of what it reads, then of what it makes."""
    from iree.compiler import ir

    return [ir.AffineMapAttr(a).value for a in op.attributes["indexing_maps"]]


def loops_of(indexing: Any) -> list[int | None]:
    """Return the loop that each dimension of a map goes along; None: a number, or several loops."""
    from iree.compiler import ir

    return [d.position if isinstance(d, ir.AffineDimExpr) else None for d in indexing.results]


def dim_of(op: Any) -> int:
    """Return the dimension that a concatenation is along, or the loop that an index is of."""
    return int(op.attributes["dim"].value)


def loop_of_index(value: Any) -> int | None:
    """Return the loop in whose body a value is the index; None: it is none."""
    is_index = maker_of(value) == "linalg.index"
    return dim_of(value.owner) if is_index else None


def is_of_nothing(op: Any) -> bool:
    """Say whether an op makes tensors of no other: one number everywhere, or 0, 1, 2, ..."""
    return bool(op.name.startswith("linalg.")) and not any(map(is_tensor, inputs_of(op)))


def is_zeros(value: Any) -> bool:
    """Say whether a tensor is zeros, as sums begin with."""
    return maker_of(value) == "linalg.fill" and constant_of(value.owner.operands[0]) == 0


def is_transpose(op: Any, order: Sequence[int]) -> bool:
    """Say whether what makes a value is a transposition to this order."""
    is_one = getattr(op, "name", "") == "linalg.transpose"
    return is_one and list(op.attributes["permutation"]) == list(order)


def is_elementwise(op: Any) -> bool:
    """Say whether an op computes each number of its result by itself."""
    if op.operation.name != "linalg.generic":
        return False
    return all("parallel" in str(kind) for kind in op.attributes["iterator_types"])


def is_arithmetic(op: Any) -> bool:
    """Say whether what an op computes of its numbers depends on nothing else, such as places."""
    return all(inner.name.startswith(("arith.", "linalg.yield")) for inner in ops_of(op))


def broadcast_inputs(op: Any) -> list[int]:
    """Return which operands a `linalg.generic` reads again for other numbers of its loops."""
    if op.operation.name != "linalg.generic":
        return []
    maps = maps_of(op)[: len(inputs_of(op))]
    return [i for i, read in enumerate(maps) if len(read.results) < read.n_dims]


def repeated_dims(op: Any) -> set[int]:
    """Return the dimensions along which an op repeats what it reads; none if it does more."""
    if not is_elementwise(op) or len(op.results) != 1 or len(inputs_of(op)) != 1:
        return set()
    block = op.regions[0].blocks[0]
    first = next(iter(block.operations))  # the yield, if it is the only op
    if first.operation.name != "linalg.yield" or first.operands[0] != block.arguments[0]:
        return set()
    read, made = maps_of(op)
    return set(range(made.n_dims)).difference(loops_of(read))


def products_of(value: Any) -> list[Any]:
    """Return the products that read a value, as it is, reshaped or transposed."""
    users = [use.owner.operation for use in value.uses]
    found = [user for user in users if user.name in PRODUCTS]
    for user in users:
        if user.name in _PASSES_ON:
            found += products_of(user.results[0])
    return found


def makes_factor(value: Any) -> bool:
    """Say whether a product reads a value, as it is, reshaped or transposed."""
    return bool(products_of(value))

"""How much work a device program is: the bytes that it moves, and its arithmetic, by its shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from lowering.stages.ir.device_programs import FLOPS, LOAD, STORE
from lowering.stages.ir.structured import inputs_of, is_elementwise, loops_of, maps_of
from lowering.stages.ir.symbols import ops_of
from lowering.stages.ir.types import sizes_of

_LOOP = "scf.for"
_ITEM = "hal.interface.workgroup.id"
_TENSOR = re.compile(r"\btensor<([\dx]+)x\w+>")  # of known sizes
_WHOLE = re.compile(r"\btensor<((?:[\d?]+x)*)(\w+)>")
# What is no arithmetic in the body of a loop: comparisons, choices, casts, indexing.
_FREE = ("arith.cmp", "arith.select", "arith.constant", "arith.index", "arith.ext", "arith.trunc")
_CASTS = ("arith.sitofp", "arith.uitofp", "arith.fptosi", "arith.fptoui", "arith.bitcast")
_SOFTMAX = 5  # an element: maximum, difference, exponential, sum, quotient
# Ops of known arithmetic, or of none, beside `linalg.generic`.
_ATTENTION = ("iree_linalg_ext.attention", "iree_linalg_ext.online_attention")
_INDEXED = ("tensor.extract", "iree_linalg_ext.gather", "iree_linalg_ext.scatter")
_MOVES = ("iree_linalg_ext.gather", "iree_linalg_ext.scatter", "iree_linalg_ext.yield")


def bytes_moved(ops: Sequence[Any]) -> int | None:
    """Return the bytes of what is loaded and stored; by several work items, of all they share.

    None if they depend on dynamic sizes, or on data: of what is indexed, part is read.
    """
    if any(map(_is_indexed, ops)):
        return None
    loads, stores = ([op for op in ops if op.name == name] for name in (LOAD, STORE))
    if any(op.name == _ITEM for op in ops):
        wholes = {op.operands[place] for place, of in ((0, loads), (1, stores)) for op in of}
        sizes = [_bytes_of_whole(whole) for whole in wholes]
    else:
        moved = [*(op.results[0] for op in loads), *(op.operands[0] for op in stores)]
        sizes = [_bytes(value.type) for value in moved]
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _is_indexed(op: Any) -> bool:
    """Say whether an op takes part of a tensor that indices choose, or makes such an index."""
    if op.name != "tensor.extract" or math.prod(op.operands[0].type.shape) != 1:
        return op.name in _INDEXED
    users = (use.owner.operation.name for use in op.results[0].uses)
    return any(name.startswith("arith.index_cast") for name in users)


def flops(ops: Sequence[Any]) -> int | None:
    """Count additions, multiplications, ...; None if they depend on dynamic sizes or are unknown.

    A function such as the exponential counts as one; comparisons, choices and casts as none.

    Args:
        ops: a function, and all in it.
    """
    told = ops[0].attributes[FLOPS].value if FLOPS in ops[0].attributes else None
    if told is None and any(op.name == _LOOP for op in ops):
        return None
    counts = [_flops(op) for op in ops if told is None or not _is_sum(op)]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    return (told or 0) + (sum(known) * _work_items(ops) if any(known) else 0)


def _is_sum(op: Any) -> bool:
    return "iterator_types" in op.attributes and not is_elementwise(op)


def _work_items(ops: Sequence[Any]) -> int:
    """Count the work items that ops are of: 1 if they are not of one but of all."""
    if not any(op.name == _ITEM for op in ops):
        return 1
    (store,) = (op for op in ops if op.name == STORE)
    (part, *_), (whole, *_) = (_TENSOR.findall(str(value.type)) for value in store.operands[:2])
    return math.prod(map(int, whole.split("x"))) // math.prod(map(int, part.split("x")))


def _flops(op: Any) -> int | None:
    if op.name == "linalg.generic":
        loops = _loops(op, range(len(op.operands)))
        count = sum(_is_arithmetic(inner.name) for inner in ops_of(op))
        return 0 if count == 0 else _times(count, loops)
    if op.name == "linalg.softmax":
        return _times(_SOFTMAX, sizes_of(op.operands[0].type))
    if op.name in _ATTENTION:
        return _attention(op)
    is_unknown = op.name.startswith("iree_linalg_ext.") and op.name not in _MOVES
    return None if is_unknown else 0


def _attention(op: Any) -> int | None:
    """Count the two matrix products: query by key, and that by value."""
    output = len(inputs_of(op))
    first, second = _times(2, _loops(op, (0, 1))), _times(2, _loops(op, (2, output)))
    return first + second if first is not None and second is not None else None


def _loops(op: Any, operands: Sequence[int]) -> tuple[int | None, ...]:
    """Return the sizes of the loops over some operands: of the dimensions that each indexes."""
    maps = maps_of(op)
    sizes: dict[int, int | None] = {}
    for i in operands:
        for loop, size in zip(loops_of(maps[i]), sizes_of(op.operands[i].type), strict=True):
            if loop is not None:
                sizes.setdefault(loop, size)
    return tuple(sizes.values())


def _is_arithmetic(name: str) -> bool:
    return name.startswith(("arith.", "math.", "complex.")) and not name.startswith(
        (*_FREE, *_CASTS)
    )


def _times(count: int, sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return count * math.prod(known) if len(known) == len(sizes) else None


def _bytes_of_whole(value: Any) -> int | None:
    """Return the bytes of a tensor that work items load parts of, or store these to."""
    from iree.compiler import ir

    (kind,) = (f"tensor<{sizes}{dtype}>" for sizes, dtype in _WHOLE.findall(str(value.type)))
    return _bytes(ir.Type.parse(kind))


def _bytes(kind: Any) -> int | None:
    shape = sizes_of(kind)
    return _times(_element_bytes(kind.element_type), shape)


def _element_bytes(kind: Any) -> int:
    from iree.compiler import ir

    if isinstance(kind, ir.ComplexType):
        return 2 * _element_bytes(kind.element_type)
    width = 64 if isinstance(kind, ir.IndexType) else int(kind.width)
    return max(1, width // 8)

"""Tell sorts how many elements of each row are read: no more have to be in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lowering.stages.ir.device_programs import (
    DISPATCH,
    EXECUTABLE,
    LOAD,
    STORE,
    dispatches_of,
    entry_of,
    functions_of,
    is_whole,
    place_of,
    segments_of,
)
from lowering.stages.ir.symbols import constant_of, inside, symbol_of, walk

_FIRST = "npu_iree.first"
_SLICE = "flow.tensor.slice"
_SORT, _TIED = "iree_linalg_ext.sort", "flow.dispatch.tie_shape"


def read_first(module: Any) -> None:
    """Write on programs that sort how many of the first elements others read of what they made.

    Before: func.func @sort(%x) { iree_linalg_ext.sort dimension(1) outs(%x : tensor<4x256xf32>) }
            func.func @copy(%x) { dispatch.tensor.load %x, offsets = [0, 0], sizes = [4, 8] }
    After:  func.func @sort(%x) attributes {npu_iree.first = 8}; the same

    Args:
        module: one in flow, with dispatches formed.
    """
    from iree.compiler import ir

    functions = {
        symbol_of(executable): function
        for executable in inside(module, EXECUTABLE)
        for function in functions_of(executable)
    }
    for executable in inside(module, EXECUTABLE):
        (function, *_) = functions_of(executable)
        if (dim := _sorted_dim(function)) is None:
            continue
        results = [value for op in dispatches_of(module, executable) for value in op.results]
        counts = [count for value in results for count in _counts(value, dim, functions)]
        known = [count for count in counts if count is not None]
        if known and len(known) == len(counts):
            kind = ir.IntegerType.get_signless(64)
            function.attributes[_FIRST] = ir.IntegerAttr.get(kind, max(known))


def first_of(function: Any) -> int | None:
    """Return what `read_first` has written on a function, if it has."""
    return function.attributes[_FIRST].value if _FIRST in function.attributes else None


def _sorted_dim(function: Any) -> int | None:
    """Return the dimension along which a program sorts, if it does no more than that."""
    ops = list(walk(function))
    sorts = [op for op in ops if op.name == _SORT]
    stores = [op for op in ops if op.name == STORE]
    if len(sorts) != 1 or len(stores) != len(sorts[0].results):
        return None
    users = [use.owner.operation for result in sorts[0].results for use in result.uses]
    is_stored = all(user.name == STORE and is_whole(user) for user in users)
    is_all = is_stored and len(users) == len(stores)
    return sorts[0].attributes["dimension"].value if is_all else None


def _counts(value: Any, dim: int, functions: Mapping[str, Any]) -> Iterator[int | None]:
    """Give how many elements along a dimension each user of a value reads; None: not the first."""
    for use in value.uses:
        dispatch = use.owner.operation
        if dispatch.name == _SLICE:
            _, _, starts, lengths, _ = segments_of(dispatch)
            yield constant_of(lengths[dim]) if constant_of(starts[dim]) == 0 else None
            continue
        function = functions.get(entry_of(dispatch)) if dispatch.name == DISPATCH else None
        if function is None:
            yield None
            continue
        for argument in function.regions[0].blocks[0].arguments:
            if place_of(dispatch, argument) == use.operand_number:
                yield from (_count(op, dim) for op in _readers(argument))


def _readers(argument: Any) -> Iterator[Any]:
    for use in argument.uses:
        op = use.owner.operation
        if op.name == _TIED and op.operands[0] == argument:
            yield from _readers(op.results[0])
        else:
            yield op


def _count(op: Any, dim: int) -> int | None:
    if op.name != LOAD:
        return None
    begin, size, step = (
        list(op.attributes[f"static_{name}"])[dim] for name in ("offsets", "sizes", "strides")
    )
    return size if begin == 0 and step == 1 and size > 0 else None

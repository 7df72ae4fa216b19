"""Put rows where an index says in vectors, and some of the columns in each thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowering.stages.ir.device_programs import (
    EXECUTABLE,
    LOAD,
    STORE,
    functions_of,
    is_whole,
    set_workgroups,
    tell_flops,
)
from lowering.stages.ir.symbols import inside, maker_of, ops_of
from lowering.stages.ir.templates import clones, compilation_info, put
from lowering.stages.ir.types import dtype_of, sizes_of, tensor

_SCATTER, _GENERIC = "iree_linalg_ext.scatter", "linalg.generic"
_LEAST, _LINE = 1 << 13, 16  # numbers of a work item, and those that a line of a cache holds
_VECTOR = 8
_DTYPES = ("f32", "f64")
# Of a work item: some columns of all rows.
_LOOP = """
func.func @loop(%rows: {rows}, %index: {index}, %all: {all}) {{
  %first = arith.constant 0 : index
  %step = arith.constant 1 : index
  %count = arith.constant {count} : index
  %block = flow.dispatch.workgroup.id[0] : index
  %begin = affine.apply affine_map<(d0) -> (d0 * {some})>(%block)
  scf.for %i = %first to %count step %step {{
    %one = iree_tensor_ext.dispatch.tensor.load %index, offsets = [{at}], sizes = [{single}],
        strides = [{single}] : {index} -> tensor<{place}>
    %number = tensor.extract %one[] : tensor<{place}>
    %place = arith.index_cast %number : {place} to index
    %row = iree_tensor_ext.dispatch.tensor.load %rows, offsets = [%i, %begin], sizes = [1, {some}],
        strides = [1, 1] : {rows} -> {part}
    %old = iree_tensor_ext.dispatch.tensor.load %all, offsets = [%place, %begin],
        sizes = [1, {some}], strides = [1, 1] : {all} -> {part}
    %new = linalg.generic {{
        indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> (d0)>],
        iterator_types = ["parallel"]
    }} ins(%row : {part}) outs(%old : {part}) attrs = {{compilation_info = {tiles}}} {{
    ^bb0(%x: {dtype}, %y: {dtype}):
      linalg.yield %x : {dtype}
    }} -> {part}
    iree_tensor_ext.dispatch.tensor.store %new, %all, offsets = [%place, %begin],
        sizes = [1, {some}], strides = [1, 1] : {part} -> {all}
  }}
  return
}}
"""


def put_rows(module: Any) -> None:
    """Write what puts rows of floats where an index says as a loop over the rows.

    IREE puts number by number, and in one thread: to add up 5000 rows of 64 into 100 took 0.28 ms,
    and takes 0.07 (two cores, AVX2). The rows of a place are put in the same order.

    Before: %y = iree_linalg_ext.scatter ins(%rows, %index) outs(%all) {...}
    After:  for each block of columns:
                for %i in 0..5000: %all[%index[%i], block] = ...(%rows[%i, block])

    Of unknown sizes, of rows that are shorter than a vector, and where more is computed in the same
    device program, it stays as it is. So does what only copies rows, in which IREE sees a copy, and
    forgets how it was to be computed: all of it by each of the threads.

    Args:
        module: one in flow, its dispatches formed.
    """
    for executable in inside(module, EXECUTABLE):
        for function in functions_of(executable):
            *ops, _ = ops_of(function)
            named = [op for op in ops if op.name != "arith.constant"]
            is_alone = [op.name for op in named] == [LOAD, LOAD, LOAD, _SCATTER, STORE]
            if is_alone and _puts_rows(*named[3:]):
                _write(executable, function, named)


def _puts_rows(op: Any, store: Any) -> bool:
    """Say whether a scatter puts whole rows in a matrix in memory, each by one number, in order."""
    values = list(op.operands)
    if not all(maker_of(value) == LOAD and is_whole(value.owner) for value in values):
        return False
    rows, index, whole = (sizes_of(value.type) for value in values)
    computes = all(any(True for _ in number.uses) for number in op.regions[0].blocks[0].arguments)
    return (
        computes
        and is_whole(store)
        and store.operands[1] == values[2].owner.operands[0]
        and None not in (*rows, *index, *whole)
        and len(rows) == len(whole) == 2
        and rows[1] == whole[1]
        and values[0].type.shape[1] >= _VECTOR
        and index[1:] in ((), (1,))
        and list(op.attributes["dimension_map"]) == [0]
        and dtype_of(values[0]) in _DTYPES
    )


def _write(executable: Any, function: Any, old: Sequence[Any]) -> None:
    from iree.compiler import ir

    *_, op, store = old
    (count, width), dtype = op.operands[0].type.shape, dtype_of(op.operands[0])
    arguments = [value.owner.operands[0] for value in op.operands]
    some = _columns_at_a_time(count, width)
    single = ", ".join("1" for _ in op.operands[1].type.shape)
    text = _LOOP.format(
        **dict(zip(("rows", "index", "all"), (a.type for a in arguments), strict=True)),
        count=count,
        some=some,
        at="%i, 0" if "," in single else "%i",
        single=single,
        place=dtype_of(op.operands[1]),
        part=tensor([some], dtype),
        dtype=dtype,
        tiles=compilation_info(
            {"distribution": [0], "vector_common_parallel": [_VECTOR]}, peels=True
        ),
    )
    with ir.InsertionPoint(store), op.location:
        put(text, arguments)
    (loop,) = inside(function, "scf.for")
    (generic,) = inside(loop, _GENERIC)
    _combine(op, generic)
    tell_flops(function, count * width)
    set_workgroups(executable, [width // some, 1, 1])
    for left in reversed(old):
        left.erase()


def _columns_at_a_time(count: int, width: int) -> int:
    """Return how many columns a work item has: lines of their own, if there is enough to do."""
    parts = [n for n in (4, 3, 2) if width % (n * _LINE) == 0 and count * width >= n * _LEAST]
    return width // max(parts, default=1)


def _combine(op: Any, generic: Any) -> None:
    """Have an op compute, of what is put and what is there, what a scatter does."""
    from iree.compiler import ir

    source, target = op.regions[0].blocks[0], generic.regions[0].blocks[0]
    (end,) = target.operations
    *ops, result = source.operations
    with ir.InsertionPoint(end):
        values = clones(ops, dict(zip(source.arguments, target.arguments, strict=True)))
    end.operation.operands[0] = values.get(result.operands[0], result.operands[0])

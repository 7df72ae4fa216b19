"""Rows that are put where an index says are put as rows, not number by number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from lowering.stages.ir.structured import (
    inputs_of,
    is_arithmetic,
    is_elementwise,
    loop_of_index,
    loops_of,
    maps_of,
)
from lowering.stages.ir.symbols import constant_of, maker_of, ops_of
from lowering.stages.ir.templates import put
from lowering.stages.ir.types import dtype_of, is_tensor, sizes_of, tensor
from lowering.stages.linalg.index_inside import compute_inside

_GENERIC, _EXTRACT = "linalg.generic", "tensor.extract"
_PLACES = """
func.func @places(%index: {index}) -> {flat} {{
  %empty = tensor.empty() : {places}
  %places = linalg.generic {{
      indexing_maps = [affine_map<({loops}) -> ({read})>, affine_map<({loops}) -> ({loops})>],
      iterator_types = [{parallel}]
  }} ins(%index : {index}) outs(%empty : {places}) {{
  ^bb0(%along: i64, %out: i64):
    %column = linalg.index {rank} : index
{steps}
    linalg.yield {last} : i64
  }} -> {places}
  %flat = tensor.collapse_shape %places [{rows}, [{rank}]] : {places} into {flat}
  return %flat : {flat}
}}
"""
_STEP = """
    %n{d} = arith.constant {d} : index
    %is{d} = arith.cmpi eq, %column, %n{d} : index
    %at{d} = linalg.index {d} : index
    %own{d} = arith.index_cast %at{d} : index to i64
    %v{d} = arith.select %is{d}, %own{d}, {last} : i64
"""
_ROWS = """
func.func @rows(%x: {x}) -> {y} {{
  %flat = tensor.collapse_shape %x {groups} : {x} into {flat}
  %y = tensor.expand_shape %flat {places} output_shape {sizes} : {flat} into {y}
  return %y : {y}
}}
"""
_FILLED = """
func.func @filled(%x: {dtype}) -> {y} {{
  %empty = tensor.empty() : {y}
  %y = linalg.fill ins(%x : {dtype}) outs(%empty : {y}) -> {y}
  return %y : {y}
}}
"""


class _Form(NamedTuple):
    """How torch-mlir puts numbers into a tensor, one by one.

    Attributes:
        sizes: of what is put.
        index: where along one dimension; a tensor of these sizes.
        dim: that dimension. Along the others, each number goes where it comes from.
        source: what is put: a tensor of these sizes, or one number for all.
    """

    sizes: tuple[int, ...]
    index: Any
    dim: int
    source: Any


def scatter_rows(function: Any) -> None:
    """Put a row at once where all its numbers go by the same index.

    torch-mlir puts each number by itself, and says for each where it goes along all dimensions.

    Before: %i = linalg.generic {(d0, d1) -> (d0)} ins(%index) -> tensor<40x8xi64>
            %7:3 = linalg.generic { extract %i[%d0, %d1], %d1, extract %x[%d0, %d1] }
            %8 = tensor.insert_slice %7#0, %7#1 -> tensor<320x2xi64>
            %9 = tm_tensor.scatter ins(%7#2, %8 : tensor<320xf32>, tensor<320x2xi64>)
    After:  %8 = linalg.generic ins(%index) -> tensor<40x1xi64>
            %9 = tm_tensor.scatter ins(%x, %8 : tensor<40x8xf32>, tensor<40x1xi64>)
    """
    for op in ops_of(function):
        form = _form_of(op) if op.name == "tm_tensor.scatter" else None
        if form and (rank := _rank_of_rows(form, sizes_of(op.results[0].type))):
            _put_rows(op, form, len(form.sizes) - rank)


def _form_of(op: Any) -> _Form | None:
    """Read how numbers are put; None: in another way."""
    updates, indices, _ = op.operands
    numbers = [_computed(column) for column in _columns(indices)]
    chosen = [d for d, number in enumerate(numbers) if maker_of(number) == _EXTRACT]
    if len(numbers) < 2 or len(chosen) != 1:
        return None
    (dim,) = chosen
    index, *places = numbers[dim].owner.operands
    sizes = tuple(size for size in sizes_of(index.type) if size is not None)
    own = [number for d, number in enumerate(numbers) if d != dim]
    there = [place for d, place in enumerate(places) if d != dim]
    if (
        len(sizes) != len(places)
        or not _are_row_major(places, sizes)
        or not all(map(_is_cast, own, there))
    ):
        return None
    source = _source(updates, places, sizes)
    return None if source is None else _Form(sizes, index, dim, source)


def _columns(indices: Any) -> list[Any]:
    """Return the tensors that indices are put together from: one for each dimension."""
    columns: list[Any] = []
    last = sizes_of(indices.type)[-1] or 0
    for d in reversed(range(last)):
        if maker_of(indices) != "tensor.insert_slice" or len(indices.owner.operands) > 2:
            return []  # of a size that is not known, if it is one
        if list(indices.owner.attributes["static_offsets"]) != [0, d]:
            return []
        column, indices = indices.owner.operands
        columns.insert(0, column)
    return columns


def _computed(value: Any) -> Any:
    """Return what an op that reads no tensor as it goes computes for each number of a value."""
    from iree.compiler import ir

    if maker_of(value) != _GENERIC or inputs_of(value.owner):
        return value
    *_, last = ops_of(value.owner)
    return last.operands[ir.OpResult(value).result_number]


def _are_row_major(places: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Say whether the places in a tensor of some sizes are those of the numbers, one by one."""
    number, size = None, None
    for place, of in zip(reversed(places), reversed(sizes), strict=True):
        if maker_of(place) != "arith.remsi":
            return False
        whole, by = place.owner.operands
        is_next = _is_divided(whole, number, size) if number else loop_of_index(whole) == 0
        if not is_next or constant_of(by) != of:
            return False
        number, size = whole, of
    return True


def _is_divided(value: Any, number: Any, by: int | None) -> bool:
    if maker_of(value) != "arith.divsi":
        return False
    return bool(value.owner.operands[0] == number) and constant_of(value.owner.operands[1]) == by


def _is_cast(number: Any, place: Any) -> bool:
    return maker_of(number) == "arith.index_cast" and bool(number.owner.operands[0] == place)


def _source(updates: Any, places: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return what is put: a tensor, or a number; None: something else."""
    if maker_of(updates) == "linalg.fill":
        return updates.owner.operands[0]
    number = _computed(updates)
    if maker_of(number) != _EXTRACT:
        return None
    source, *at = number.owner.operands
    return source if at == list(places) and sizes_of(source.type) == sizes else None


def _rank_of_rows(form: _Form, sizes: Sequence[int | None]) -> int:
    """Count the last dimensions along which all go by the same index, into rows of their size."""
    alike, rank = _alike(form.index), 0
    for d in reversed(range(form.dim + 1, len(sizes))):
        if d not in alike or sizes[d] != form.sizes[d]:
            break
        rank += 1
    return rank


def _alike(value: Any) -> set[int]:
    """Return the dimensions along which a tensor is the same all along, as far as is known."""
    op = value.owner
    if maker_of(value) == "tensor.empty":
        return set(range(len(sizes_of(value.type))))
    if maker_of(value) != _GENERIC or not is_elementwise(op) or len(op.results) != 1:
        return set()
    if not is_arithmetic(op):
        return set()
    maps = maps_of(op)
    loops: set[int | None] = set(range(maps[-1].n_dims))
    for read, x in zip(map(loops_of, maps), op.operands, strict=True):
        alike = _alike(x)
        loops -= {loop for d, loop in enumerate(read) if d not in alike}
        if None in read:
            return set()
    return {d for d, loop in enumerate(loops_of(maps[-1])) if loop in loops}


def _put_rows(op: Any, form: _Form, kept: int) -> None:
    """Put rows, which are along all but some of the first dimensions."""
    from iree.compiler import ir

    with op.location, ir.InsertionPoint(op):
        given = _rows(form, kept, dtype_of(op.operands[0])), _places(form, kept)
        rows = op.clone()
        rows.operands[0], rows.operands[1] = given
        rows.attributes["dimension_map"] = ir.DenseI64ArrayAttr.get(range(kept))
    op.results[0].replace_all_uses_with(rows.results[0])
    op.erase()


def _rows(form: _Form, kept: int, dtype: str) -> Any:
    """Return what is put, as rows: one of each of the dimensions that their places are along."""
    count, row = math.prod(form.sizes[:kept]), form.sizes[kept:]
    sizes, rank = [count, *(1 for _ in range(kept)), *row], len(form.sizes)
    made = tensor(sizes, dtype)
    if not is_tensor(form.source):
        return put(_FILLED.format(dtype=dtype, y=made), [form.source])[0]
    text = _ROWS.format(
        x=form.source.type,
        groups=[list(range(kept)), *([d] for d in range(kept, rank))],
        flat=tensor([count, *row], dtype),
        places=[list(range(kept + 1)), *([d + 1] for d in range(kept, rank))],
        sizes=sizes,
        y=made,
    )
    return put(text, [form.source])[0]


def _places(form: _Form, kept: int) -> Any:
    """Return where each row goes, a column for each of the dimensions before it."""
    loops = [f"d{d}" for d in range(kept + 1)]
    steps, last = list[str](), "%along"
    for d in (d for d in range(kept) if d != form.dim):
        steps.append(_STEP.format(d=d, last=last))
        last = f"%v{d}"
    text = _PLACES.format(
        index=form.index.type,
        places=tensor([*form.sizes[:kept], kept], "i64"),
        flat=tensor([math.prod(form.sizes[:kept]), kept], "i64"),
        loops=", ".join(loops),
        read=", ".join([*loops[:kept], *("0" for _ in form.sizes[kept:])]),
        parallel=", ".join('"parallel"' for _ in loops),
        rank=kept,
        rows=list(range(kept)),
        steps="".join(steps),
        last=last,
    )
    (flat,) = put(text, [form.index])
    compute_inside(flat.owner.operands[0].owner)
    return flat

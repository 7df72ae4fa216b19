"""Write products of few rows so that memory gives the matrix once, in the order it lies in."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowering.cpu import best_for
from lowering.stages.ir.barrier import put_barriers
from lowering.stages.ir.factors import (
    HALVES,
    TO_FLOAT,
    as_float,
    is_plain,
    is_weight,
    narrow_factor,
    shapes_of,
    transposed,
)
from lowering.stages.ir.structured import RESHAPES, is_elementwise, loops_of, maps_of
from lowering.stages.ir.symbols import maker_of, ops_of, walk
from lowering.stages.ir.templates import compilation_info, replace_by
from lowering.stages.ir.types import tensor

_LOOPS = {  # of the matrix, the other factor, and the result
    "linalg.matvec": ("nk", "k", "n"),
    "linalg.matmul": ("kn", "mk", "mn"),
    "linalg.batch_matmul": ("hkn", "hmk", "hmn"),
}
_LANES = 16  # floats of a cache line
_MOST_ROWS, _MOST_ROWS_OF_STACK = 8, 4  # of one product, and of each of a batch
# Sums at a time, in cache lines: half of the registers (32 of 64 bytes, 16 of 32 bytes).
_SUMS = {frozenset({"avx512f"}): 16, frozenset[str](): 4}
_SIDE_BY_SIDE = range(3, 9)  # columns at a time, if each is a row in memory
_ACROSS = 128  # columns at a time, else
# Floats of the matrix that a work item reads: 8 rows, if they are long. The task system hands out
# 8 items at a time (`iree/task/tuning.h`), and with larger ones a worker that woke late finds
# nothing left of a small matrix, or the last has most of it to itself.
_ITEM = 4096
# `math.fma` with -0.0 is the product, by which `_marked` knows it; `arith.mulf` would be taken for
# a matrix product again.
_ADD = """{{
  ^bb0(%a: {dtype}, %b: f32, %sum: f32):
    {widen}
    %nothing = arith.constant -0.0 : f32
    %ab = math.fma %{factor}, %b, %nothing : f32
    %next = arith.addf %sum, %ab : f32
    linalg.yield %next : f32
  }}"""
_PRODUCT = """
func.func private @product(%w: {w}, %x: {x}, %start: {y}) -> {y} {{
  %y = linalg.generic {{indexing_maps = {maps}, iterator_types = [{parallel}, "reduction"]}}
      ins(%w, %x : {w}, {x}) outs(%start : {y}) {add} -> {y}
  return %y : {y}
}}
"""
_IN_LANES = """
#lines = #iree_cpu.lowering_config<vector_reduction = {a_line}>
func.func private @product(%w: {w}, %x: {x}, %start: {y}) -> {y} {{
  %w_lines = tensor.expand_shape %w {w_groups} output_shape {w_sizes} : {w} into {w_lines}
  %x_lines = tensor.expand_shape %x {x_groups} output_shape {x_sizes} : {x} into {x_lines}
  %unset = tensor.empty() : {lanes}
  %zero = arith.constant 0.0 : f32
  %zeros = linalg.fill ins(%zero : f32) outs(%unset : {lanes}) -> {lanes}
  %lanes = linalg.generic {{
      indexing_maps = {maps}, iterator_types = [{parallel}, "parallel", "reduction"]}}
      ins(%w_lines, %x_lines : {w_lines}, {x_lines}) outs(%zeros : {lanes})
      attrs = {{lowering_config = #lines}} {add} -> {lanes}
  %y = linalg.generic {{indexing_maps = {sum_maps}, iterator_types = [{parallel}, "reduction"]}}
      ins(%lanes : {lanes}) outs(%start : {y}) attrs = {{compilation_info = {tiles}}} {{
  ^bb0(%lane: f32, %sum: f32):
    %next = arith.addf %sum, %lane : f32
    linalg.yield %next : f32
  }} -> {y}
  return %y : {y}
}}
"""


def mark_few_rows(function: Any) -> None:
    """Mark the products of floats that read a matrix for a few rows of the other factor.

    As reductions of one loop, they take what is computed of their results into their device
    programs, and nothing is packed; how they are read is written when these are formed
    (`read_by_rows`).

    Before: %y = linalg.matvec ins(%w, %x)                                 with %w of [N, K]
    After:  %y[n] = sum over k of %w[n, k] * %x[k]

    Before: %y = linalg.batch_matmul ins(%x, %w)             with %x of [H, M, K], %w of [H, K, N]
    After:  %y[h, m, n] = sum over k of %w[h, k, n] * %x[h, m, k]

    Before: %y = linalg.batch_matmul ins(%x, linalg.transpose %w)             with %w of [H, N, K]
    After:  %y[h, m, n] = sum over k of %w[h, n, k] * %x[h, m, k]

    And so for linalg.matmul, without the loop h. A weight that is bound is left alone: packed once,
    at load, it is read as one stream; in training it is an argument, and would be packed in each
    call, which takes several times as long as to read it.
    """
    seen = set[Any]()
    for op in ops_of(function):
        found = _product_of(op)
        if found is not None and found[0].can_be_read():
            product, arguments = found
            _keep_apart(replace_by(op, product.as_reduction(), arguments), seen)


def _keep_apart(value: Any, seen: set[Any]) -> None:
    """Put a barrier before what repeats or transposes a product, as it is or after other ops.

    IREE would have the first in the product's program, in a loop that the product's tiles leave
    whole ("large vector sizes"): the gradient of `linear(x[:, 0])`, say, among zeros for all of
    `x`. The second would have the product read its matrix in another order than it lies in (the
    gradient of a weight of 3 features and 128 channels, 3x3, of 96x96: 78 ms, not 2).

    Args:
        value: the product.
        seen: what has been followed, of it or of another.
    """
    values = [value]
    while values:
        value = values.pop()
        for use in list(value.uses):
            user = use.owner.operation
            if user.name == "linalg.transpose" and _moves(user):
                put_barriers(user, [use.operand_number])
            elif not (user.name in RESHAPES or is_elementwise(user)):
                continue
            elif any(_size(result) > _size(value) for result in user.results):
                put_barriers(user, [use.operand_number])
            else:
                values += [result for result in user.results if result not in seen]
                seen.update(user.results)


def _size(value: Any) -> int:
    return math.prod(value.type.shape)


def _moves(transpose: Any) -> bool:
    """Say whether numbers get into another order: dimensions of 1 may be anywhere."""
    sizes, order = transpose.operands[0].type.shape, transpose.attributes["permutation"]
    moved = [d for d in order if sizes[d] != 1]
    return moved != sorted(moved)


def read_by_rows(module: Any, features: Collection[str]) -> None:
    """Have each marked product read its matrix in the order of memory.

    Left to itself, IREE packs the matrix, and reads it as one stream, which many memories are slow
    at. Told not to, it takes 16 rows and columns at a time for an outer product: it transposes them
    in registers and adds up the columns one after the other, which takes longer than the memory
    does. Here nothing is moved, and no sum waits for another: 268 MB are read at 27.6 GB/s instead
    of 22.9 (two cores of a Granite Rapids; MKL 28.2). Attention of 16 queries to 8 heads with 512
    keys each takes 0.09 ms instead of 0.22 (two cores of an EPYC, Zen 4).

    Before: %y[n] = sum over k of %w[n, k] * %x[k]                         with %w of [N, K]
    After:  %lanes[n, l] = sum over k of %w[n, k, l] * %x[k, l]            with %w of [N, K/16, 16]
            %y[n] = sum over l of %lanes[n, l]

    Before: %y[m, n] = sum over k of %w[k, n] * %x[m, k]
    After:  the same, as many columns at a time as there are registers for their sums

    Args:
        module: one in flow, its dispatches formed: IREE would make two of such sums before that.
        features: of the CPU that is compiled for, by LLVM's names.
    """
    from iree.compiler import ir

    sums = best_for(features, _SUMS)
    for op in [op for op in walk(module) if op.name == "linalg.generic"]:
        product = _marked(op)
        if product is None or not product.can_be_read():
            continue
        if product.is_by_rows():
            replace_by(op, product.in_lanes(sums), list(op.operands))
        else:
            op.attributes["compilation_info"] = ir.Attribute.parse(product.tiles(sums))


@dataclass(frozen=True)
class _Product:
    """A sum over a loop k of what two factors have, in loops that have letters.

    Attributes:
        w: the loops along the dimensions of the matrix, or of a batch of matrices.
        x: those of the other factor, k last.
        y: those of the result, in order.
        steps: of each loop.
        dtype: of the matrix: floats, or signed bytes, which are widened one by one.
    """

    w: str
    x: str
    y: str
    steps: Mapping[str, int]
    dtype: str = "f32"

    @classmethod
    def of(cls, loops: Sequence[str], shapes: Sequence[Sequence[int]], dtype: str) -> _Product:
        """Take the loops and the shapes of both factors and of the result."""
        sizes = zip("".join(loops), (size for shape in shapes for size in shape), strict=True)
        w, x, y = loops
        return cls(w, x, y, dict(sizes), dtype)

    def can_be_read(self) -> bool:
        """Say whether the rows are few, and the matrix has whole cache lines."""
        columns, rows = self._column_loops, self._row_loops
        if not (columns and self.w and self.x.endswith("k") and len(rows) <= 1):
            return False
        line, column = self.w[-1], columns[-1]
        is_known = line in (column, "k") and all(self.steps.values()) and self.steps[column] > 1
        most = _MOST_ROWS if len(self.w) == 2 else _MOST_ROWS_OF_STACK
        return is_known and self.steps[line] % _LANES == 0 and self._rows <= most

    def is_by_rows(self) -> bool:
        """Say whether the numbers that are added up lie side by side in the matrix."""
        return self.w[-1] == "k"

    def as_reduction(self) -> str:
        """Write it as one loop."""
        return self._write(_PRODUCT, maps=self._maps("k", self.w, self.x, self.y))

    def in_lanes(self, sums: int) -> str:
        """Write it as sums of each lane, and their sum; for the argument see `tiles`."""
        w, x, y = self.w + "l", self.x + "l", self.y
        steps = {**self.steps, "k": self.steps["k"] // _LANES, "l": _LANES}
        lines = replace(self, w=w, x=x, y=y, steps=steps)
        return self._write(
            _IN_LANES,
            a_line=[0] * len(y) + [0, 1],
            w_groups=_last_in_two(self.w),
            x_groups=_last_in_two(self.x),
            w_sizes=[lines.steps[i] for i in w],
            x_sizes=[lines.steps[i] for i in x],
            w_lines=lines._kind(w, self.dtype),
            x_lines=lines._kind(x),
            lanes=lines._kind(y + "l"),
            maps=self._maps("lk", w, x, y + "l"),
            sum_maps=self._maps("l", y + "l", y),
            tiles=self.tiles(sums),
        )

    def tiles(self, sums: int) -> str:
        """Write the tiles of the result: of a work item, and of what is computed at a time.

        A tile that leaves a rest takes half of the rate for all.

        Args:
            sums: cache lines that stay in registers.
        """
        column = self._column_loops[-1]
        columns, rows = self.steps[column], self._rows
        columns_at_once = max(1, sums // rows)  # of registers that are few, too
        if self.is_by_rows():
            most = min(_SIDE_BY_SIDE[-1], columns_at_once, columns)
            at_once = _largest_divisor(columns, most)
            if at_once < _SIDE_BY_SIDE[0]:
                at_once = most
            item = at_once * _largest_divisor(
                columns // at_once, _ITEM // self.steps["k"] // at_once
            )
        else:
            item = math.gcd(columns, _ACROSS)
            lines = 1 << columns_at_once.bit_length() - 1
            at_once = math.gcd(item, lines * _LANES)
        whole = {i: self.steps[i] for i in self._row_loops}
        items = {**whole, column: item}
        tiles = {**dict.fromkeys(whole, rows), column: at_once}
        written = {
            "distribution": [items.get(i, 1) for i in self.y] + [0],
            "vector_common_parallel": [tiles.get(i, 1) for i in self.y] + [0],
        }
        if not self.is_by_rows():
            written["vector_reduction"] = [0] * len(self.y) + [1]
        return compilation_info(written)

    @property
    def _rows(self) -> int:
        return math.prod(self.steps[i] for i in self._row_loops)

    @property
    def _row_loops(self) -> str:
        return "".join(i for i in self.y if i not in self.w)

    @property
    def _column_loops(self) -> str:
        return "".join(i for i in self.y if i not in self.x)

    def _maps(self, inner: str, *operands: str) -> str:
        loops = ", ".join(self.y + inner)
        maps = [f"affine_map<({loops}) -> ({', '.join(operand)})>" for operand in operands]
        return f"[{', '.join(maps)}]"

    def _kind(self, loops: str, dtype: str = "f32") -> str:
        return tensor([self.steps[i] for i in loops], dtype)

    def _write(self, template: str, **others: Any) -> str:
        widen, factor = as_float("a", self.dtype)
        return template.format(
            w=self._kind(self.w, self.dtype),
            x=self._kind(self.x),
            y=self._kind(self.y),
            parallel=", ".join(['"parallel"'] * len(self.y)),
            add=_ADD.format(dtype=self.dtype, widen=widen, factor=factor),
            **others,
        )


def _product_of(op: Any) -> tuple[_Product, list[Any]] | None:
    """Return a product, its matrix, other factor and start; None if an op is no such product."""
    name = op.operation.name
    if name not in _LOOPS or (shapes := shapes_of(op)) is None:
        return None
    x, w, start = op.operands
    if name == "linalg.matvec":
        w, x = x, w
    if (narrow := narrow_factor(w)) is not None:
        w = narrow
    dtype = str(w.type.element_type)
    if name == "linalg.matvec":
        return _Product.of(_LOOPS[name], shapes, dtype), [w, x, start]
    rank = len(shapes[0])
    source = transposed(w, rank)
    is_bound = is_weight(w) or (rank == 2 and source is not None and is_weight(source))
    is_read_once = dtype in HALVES and shapes[0][-2] == 1  # a weight, but packed it is no nearer
    if (is_bound and not is_read_once) or not is_plain(op.operation, rank):
        return None
    product = _Product.of(_LOOPS[name], (shapes[1], shapes[0], shapes[2]), dtype)
    if source is None:
        return product, [w, x, start]
    swapped = product.w[:-2] + product.w[:-3:-1]
    return replace(product, w=swapped), [source, x, start]


def _marked(op: Any) -> _Product | None:
    """Return what an op computes if it was marked, and IREE has fused nothing into it."""
    maps = maps_of(op)
    if len(maps) != 3 or not _adds_products(op) or (shapes := shapes_of(op, narrow_at=0)) is None:
        return None
    outer = maps[2].n_dims - 1
    letters = [*"abcdefgh"[:outer], "k"]  # the loops of the result, then the sum's
    if len(letters) <= outer or not all(m.is_projected_permutation for m in maps):
        return None
    loops = ["".join(letters[loop] for loop in loops_of(m) if loop is not None) for m in maps]
    if loops[2] != "".join(letters[:-1]):
        return None
    return _Product.of(loops, shapes, str(op.operands[0].type.element_type))


def _adds_products(op: Any) -> bool:
    """Say whether the body of an op is `_ADD`; the constant may stand outside."""
    block = op.regions[0].blocks[0]
    body = [inner.operation for inner in block.operations]
    computed = [inner for inner in body if inner.name != "arith.constant"]
    x, y, before = block.arguments
    if computed[0].name in TO_FLOAT.values() and computed[0].operands[0] == x:
        x = computed.pop(0).results[0]
    if [inner.name for inner in computed] != ["math.fma", "arith.addf", "linalg.yield"]:
        return False
    product, total, end = computed
    a, b, nothing = product.operands
    return (
        {a, b} == {x, y}
        and _is_minus_zero(nothing)
        and set(total.operands) == {before, product.results[0]}
        and list(end.operands) == [total.results[0]]
    )


def _is_minus_zero(value: Any) -> bool:
    from iree.compiler import ir

    if maker_of(value) != "arith.constant":
        return False
    number = ir.FloatAttr(value.owner.attributes["value"]).value
    return number == 0.0 and math.copysign(1.0, number) < 0


def _largest_divisor(number: int, most: int) -> int:
    return max((n for n in range(1, most + 1) if number % n == 0), default=1)


def _last_in_two(loops: str) -> list[list[int]]:
    """Write the groups of an expansion of the last dimension."""
    last = len(loops) - 1
    return [*([i] for i in range(last)), [last, last + 1]]

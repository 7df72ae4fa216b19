"""Write products of matrices such that one factor is packed, if any, and no result unpacked."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowering.cpu import best_for
from lowering.stages.ir.barrier import put_barriers
from lowering.stages.ir.convolutions import MARK
from lowering.stages.ir.factors import (
    HALVES,
    as_float,
    is_plain,
    is_weight,
    narrow_factor,
    shapes_of,
    transposed,
)
from lowering.stages.ir.matrix_unit import COLUMNS, ROWS, has_tiles, suits_tiles
from lowering.stages.ir.structured import (
    RESHAPES,
    broadcast_inputs,
    inputs_of,
    is_elementwise,
    is_zeros,
)
from lowering.stages.ir.symbols import maker_of, ops_of, origin_of
from lowering.stages.ir.templates import compilation_info, replace_by
from lowering.stages.ir.types import is_tensor, sizes_of, tensor
from lowering.stages.ir.work_items import ANY_ROWS, work_item

# Rows (at most) and columns of a result that registers hold, by what the CPU can do, the first that
# fits: 24 of 32 registers of 16 floats, 12 of 16 registers of 8. The factors need the others.
_BLOCKS: Mapping[frozenset[str], tuple[int, int] | None] = {
    frozenset({"avx512f"}): (12, 32),
    frozenset({"avx2", "fma"}): (6, 16),
    frozenset(): None,
}
_LEAST_PADDED = 512  # columns, of which at most one panel is not full
_LEAST_MOVED = 1 << 15  # numbers of a result, for which moving its first factor once pays

# Of stacked matrices, {s} is "s, "; of single ones, nothing. {mark} is empty where rows are known.
_PRODUCT = """
func.func private @product(%x: {x}, %w: {w}, %start: {start}) -> {y} {{
  %empty = tensor.empty() : {panels}
  {pack}
  {begin}
  %parts = linalg.generic {{
      indexing_maps = [affine_map<({s}m, n, l, k) -> ({s}m, k)>,
                       affine_map<({s}m, n, l, k) -> ({s}n, k, l)>,
                       affine_map<({s}m, n, l, k) -> ({s}m, n, l)>],
      iterator_types = [{parallel}, "reduction"]}}
      ins(%x, %panels : {x}, {panels}) outs(%zeros : {split})
      attrs = {{{mark}compilation_info = {tiles}}} {{
  ^bb0(%a: f32, %b: {dtype}, %sum: f32):
    {widen}
    %ab = arith.mulf %a, %{factor} : f32
    %next = arith.addf %sum, %ab : f32
    linalg.yield %next : f32
  }} -> {split}
  {end}
  return %y : {y}
}}
"""
_PACK = """
  %zero = arith.constant 0.0 : {dtype}
  %panels = linalg.pack %w {padding} {order} inner_dims_pos = [{dim}] inner_tiles = [{width}]
      into %empty : {w} -> {panels}
"""
# Which IREE does 16x16 at a time.
_TRANSPOSE = """
  %rows = tensor.expand_shape %w {dims} output_shape {shape} : {w} into {rows}
  %moved = linalg.transpose ins(%rows : {rows}) outs(%empty : {panels}) permutation = {order}
  %panels = util.optimization_barrier %moved : {panels}
"""
# Where panels hold all of the columns, and no more.
_BEGIN = "%zeros = tensor.expand_shape %start {columns} output_shape {shape} : {y} into {split}"
_END = "%y = tensor.collapse_shape %parts {columns} : {split} into {y}"
# Where the last of them has some over.
_BEGIN_PADDED = """
  %unset = tensor.empty() : {split}
  %zeros = linalg.fill ins(%start : f32) outs(%unset : {split}) -> {split}
"""
_END_PADDED = """
  %all = tensor.collapse_shape %parts {columns} : {split} into {whole}
  %y = tensor.extract_slice %all {zeros} {sizes} {ones} : {whole} to {y}
"""
# Where the number of rows is not known; `lowering.stages.flow.rows` writes the loops.
_BEGIN_ANY_ROWS = """
  %first = arith.constant 0 : index
  %m = tensor.dim %x, %first : {x}
  %unset = tensor.empty(%m) : {split}
  %nothing = arith.constant 0.0 : f32
  %zeros = linalg.fill ins(%nothing : f32) outs(%unset : {split}) -> {split}
"""
PANELS = "npu_iree.panels"  # beside a product: rows, at most, of a block
_NAMES = {"linalg.matmul": 2, "linalg.batch_matmul": 3}  # -> dimensions of a factor


def read_in_panels(function: Any, features: Collection[str]) -> None:
    """Read the second factor of products of floats in panels as wide as two vectors.

    IREE packs both factors into panels of 16 rows or columns, and unpacks the result. A block of
    16x16 loads 17 times to make 16 multiply-adds of vectors, which is more than a CPU can; one of
    12x32 loads 14 times for 24. Its rows of the first factor need not be packed, nor the result
    unpacked, and what is computed of that follows in the same device program. Weights are packed
    once, at load.

    Where a CPU has a matrix unit, and it is the faster, the blocks are as high as its tiles, which
    take their place later (`lowering.stages.code.multiply_tiles`).

    What transposes the result stays a device program of its own: IREE would have the product write
    in the other order, number by number (32x1024 of them, and their softplus: 0.32 ms, not 0.03).
    So does what transposes the rows of a large product, or of one of any number of rows: IREE would
    have each panel read them in columns, where each number has a line of memory of its own (the
    gradient of a weight of 1376x256, from 512 rows: 4.5 ms, not 2.8).
    So does what makes rows of halves: IREE would have each panel compute them again.
    So does what reads it over and over, in loops that the product has not, and for which no block
    is known ("large vector sizes"): the gradient of a Linear on a text's first token.

    A matrix that lies transposed, and is no weight, is transposed into panels, and not packed (of
    2048x2048, in 1.4 ms instead of 3.8): in training, weights are arguments.

    A matrix of signed bytes or halves is packed as such, and widened where it is multiplied; not
    where the last panel would have columns over, nor by a matrix unit.

    Before: %y = linalg.matmul ins(%x, %w)                      with %x of [M, K], %w of [K, N]
    After:  %panels[n, k, l] = %w[k, 32 * n + l], 0 where there is no such column
            %parts[m, n, l] = sum over k of %x[m, k] * %panels[n, k, l]
            %y[m, 32 * n + l] = %parts[m, n, l]

    Args:
        function: an entry point; its parameters are loads of globals.
        features: of the CPU that is compiled for, by LLVM's names.
    Source: the blocks are those of K. Goto and R. van de Geijn, "Anatomy of High-Performance Matrix
        Multiplication" (2008).
    """
    if (block := best_for(features, _BLOCKS)) is None:
        return
    tiles = has_tiles(features)
    computed = set[Any]()  # by products, or of what they compute
    for op in ops_of(function):
        if (product := _product_of(op, block, tiles=tiles)) is not None:
            x = op.operands[0]
            if (product.is_large and _is_moved(x)) or _is_of_halves(x):
                put_barriers(op, [0])
            arguments = [op.operands[0], *product.arguments[1:]]
            computed.add(replace_by(op, product.text(), arguments))
        elif MARK in op.attributes:
            computed.update(op.results)
        elif not any(operand in computed for operand in op.operands):
            continue
        elif op.name == "linalg.transpose":
            put_barriers(op, [0])
        elif places := [i for i in broadcast_inputs(op) if op.operands[i] in computed]:
            put_barriers(op, places)
        elif op.name in RESHAPES or is_elementwise(op):
            computed.update(op.results)


@dataclass(frozen=True)
class _Product:
    """One product: its sizes, and where its operands come from.

    Attributes:
        sizes: M, K, N; M may not be known.
        stack: how many matrices there are, one after the other; empty: one that is not stacked.
        block: rows, at most, and columns that registers hold.
        is_transposed: whether the second factor is `[N, K]`.
        is_weight: whether it is packed once, at load.
        arguments: both factors, and what the sums begin with: a number where the last panel has
            columns over, or else a tensor.
        dtype: of the second factor.
    """

    sizes: tuple[int | None, int, int]
    stack: Sequence[int]
    block: tuple[int, int]
    is_transposed: bool
    is_weight: bool
    arguments: Sequence[Any]
    dtype: str

    @property
    def is_padded(self) -> bool:
        """Whether the last panel has columns over."""
        return self.sizes[2] % self.block[1] != 0

    @property
    def is_large(self) -> bool:
        """Whether there may be many numbers in the result."""
        m, _, n = self.sizes
        return m is None or m * n >= _LEAST_MOVED

    @property
    def factor(self) -> str:
        """The type of the second factor."""
        _, k, n = self.sizes
        return tensor([*self.stack, *((n, k) if self.is_transposed else (k, n))], self.dtype)

    @property
    def _begin(self) -> str:
        if self.sizes[0] is None:
            return _BEGIN_ANY_ROWS
        return _BEGIN_PADDED if self.is_padded else _BEGIN

    def text(self) -> str:
        """Write it."""
        (m, k, n), (most, width), stack = self.sizes, self.block, self.stack
        rows = 1 if m is None else -(-m // -(-m // most))  # of blocks as high as one another
        count, first = -(-n // width), len(stack)
        item = work_item(ANY_ROWS if m is None else m, count, math.prod(stack), rows)
        widen, factor = as_float("b", self.dtype)
        split, whole = [*stack, m, count, width], [*stack, m, count * width]
        ends = {
            "columns": [[d] for d in range(first + 1)] + [[first + 1, first + 2]],
            "split": tensor(split, "f32"),
            "shape": split,
            "whole": tensor(whole, "f32"),
            "x": tensor([*stack, m, k], "f32"),
            "y": tensor([*stack, m, n], "f32"),
            "zeros": [0] * len(whole),
            "sizes": [*stack, m, n],
            "ones": [1] * len(whole),
        }
        panels = tensor([*stack, count, k, width], self.dtype)
        return _PRODUCT.format(
            pack=self._pack(panels),
            x=ends["x"],
            w=self.factor,
            y=ends["y"],
            start="f32" if self.is_padded else ends["y"],
            begin=self._begin.format(**ends),
            end=(_END_PADDED if self.is_padded else _END).format(**ends),
            panels=panels,
            dtype=self.dtype,
            widen=widen,
            factor=factor,
            split=ends["split"],
            s="s, " if stack else "",
            parallel=", ".join(['"parallel"'] * (first + 3)),
            mark=f"{PANELS} = {most}, " if m is None else "",
            tiles=self._tiles(item, rows),
        )

    def _tiles(self, item: tuple[int, int], rows: int) -> str:
        """Write the tiles: of a work item (rows, panels), and so many rows by a panel at a time."""
        one, (item_rows, item_panels) = [1 for _ in self.stack], item
        tiles = {
            "distribution": [*one, item_rows, item_panels, 0, 0],
            "cache_parallel": [*one, item_rows, 1, 0, 0],
            "vector_common_parallel": [*one, rows, 1, self.block[1], 0],
            "vector_reduction": [*(0 for _ in self.stack), 0, 0, 0, 1],
        }
        return compilation_info(tiles, peels=True)

    def _pack(self, panels: str) -> str:
        """Write how the second factor gets into panels."""
        (_, k, n), width, first = self.sizes, self.block[1], len(self.stack)
        if self.is_transposed and not self.is_weight and not self.is_padded:
            shape = [*self.stack, n // width, width, k]
            return _TRANSPOSE.format(
                panels=panels,
                w=self.factor,
                rows=tensor(shape, self.dtype),
                shape=shape,
                dims=[*([d] for d in range(first)), [first, first + 1], [first + 2]],
                order=[*range(first + 1), first + 2, first + 1],
            )
        order = f"outer_dims_perm = {[*range(first), first + 1, first]}"
        return _PACK.format(
            dtype=self.dtype,
            panels=panels,
            w=self.factor,
            width=width,
            padding=f"padding_value(%zero : {self.dtype})" if self.is_padded else "",
            order="" if self.is_transposed else order,
            dim=first if self.is_transposed else first + 1,
        )


def _product_of(op: Any, block: tuple[int, int], *, tiles: bool) -> _Product | None:
    """Read an op off; None if it is no product that is written anew.

    Args:
        op: any op.
        block: rows, at most, and columns that registers hold.
        tiles: whether the CPU has a matrix unit.
    """
    rank = _NAMES.get(op.operation.name)
    if rank is None or not is_plain(op.operation, rank):
        return None
    x, w, start = op.operands
    if (shapes := shapes_of(op)) is None:
        return None if tiles else _product_of_any_rows(op, block)
    *stack, m, k = shapes[0]
    n = shapes[1][-1]
    if m < 2 or 0 in (k, n, *stack):
        return None
    narrow = narrow_factor(w)
    is_byte = narrow is not None and str(narrow.type.element_type) not in HALVES
    if tiles and suits_tiles(m, k) and not is_byte:
        block = (ROWS, COLUMNS)
    elif narrow is not None:
        w = narrow
    source = transposed(w, rank)
    factor = w if source is None else source
    dtype = str(factor.type.element_type)
    if n % block[1]:
        # With columns over, what is packed is padded, and the result is copied without them: worth
        # it for weights, which are packed once, and for the unit; and for halves.
        is_filled = maker_of(start) == "linalg.fill"
        is_worth = block == (ROWS, COLUMNS) and n >= _LEAST_PADDED and is_weight(factor)
        if not (is_filled and (is_worth or dtype in HALVES)):
            return None
        start = start.owner.operands[0]
    return _Product(
        sizes=(m, k, n),
        stack=stack,
        block=block,
        is_transposed=source is not None,
        is_weight=is_weight(factor),
        arguments=(x, factor, start),
        dtype=dtype,
    )


def _product_of_any_rows(op: Any, block: tuple[int, int]) -> _Product | None:
    """Read a product off, of a matrix of rows that are not known; None if it is another."""
    x, w, start = op.operands
    sizes, (k, n) = sizes_of(x.type), sizes_of(w.type)[-2:]
    dtypes = {str(value.type.element_type) for value in op.operands}
    is_known = None not in (k, n) and sizes == (None, k) and dtypes == {"f32"}
    if not is_known or not k or not n or n % block[1] or not is_zeros(start):
        return None
    if (narrow := narrow_factor(w)) is not None:
        w = narrow
    source = transposed(w, 2)
    factor = w if source is None else source
    return _Product(
        sizes=(None, k, n),
        stack=(),
        block=block,
        is_transposed=source is not None,
        is_weight=is_weight(factor),
        arguments=(x, factor, start),
        dtype=str(factor.type.element_type),
    )


def _is_moved(value: Any) -> bool:
    """Say whether a matrix is made by moving its numbers to another order, in any shape."""
    return maker_of(origin_of(value, RESHAPES)) == "linalg.transpose"


def _is_of_halves(value: Any) -> bool:
    """Say whether a matrix is made of halves, number by number, in any shape."""
    values, seen = [value], set[Any]()
    while values:
        value = origin_of(values.pop(), RESHAPES)
        if str(value.type.element_type) in HALVES:
            return True
        if (
            maker_of(value) == "linalg.generic"
            and is_elementwise(value.owner)
            and value not in seen
        ):
            seen.add(value)
            values += [v for v in inputs_of(value.owner) if is_tensor(v)]
    return False

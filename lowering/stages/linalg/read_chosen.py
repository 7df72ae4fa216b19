"""Have products with matrices that indices choose read these where they lie."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowering.cpu import best_for
from lowering.stages.ir.factors import is_plain, is_weight, shapes_of, transposed
from lowering.stages.ir.structured import inputs_of, is_zeros, loop_of_index, maps_of
from lowering.stages.ir.symbols import maker_of, ops_of
from lowering.stages.ir.templates import clones, put, replace_by, tiles_of_product
from lowering.stages.ir.types import floats

# Rows (at most) and columns of a result that registers hold, by what the CPU can do; half of them,
# since the others have to hide how long memory takes.
_BLOCKS: Mapping[frozenset[str], tuple[int, int] | None] = {
    frozenset({"avx512f"}): (8, 32),
    frozenset({"avx2", "fma"}): (4, 16),
    frozenset(): None,
}
_CHOICE = """
func.func private @choice(%given: tensor<{count}x{kind}>) -> tensor<{count}xi64> {{
  %unset = tensor.empty() : tensor<{count}xi64>
  %chosen = linalg.generic {{
      indexing_maps = [affine_map<(b) -> (b)>, affine_map<(b) -> (b)>],
      iterator_types = ["parallel"]}}
      ins(%given : tensor<{count}x{kind}>) outs(%unset : tensor<{count}xi64>) {{
  ^bb0(%one: {kind}, %nothing: i64):
    linalg.yield %nothing : i64
  }} -> tensor<{count}xi64>
  return %chosen : tensor<{count}xi64>
}}
"""
_READS = "!iree_tensor_ext.dispatch.tensor<readonly:{}>"
_WRITES = "!iree_tensor_ext.dispatch.tensor<writeonly:{}>"
_LOAD = "iree_tensor_ext.dispatch.tensor.load"
_PRODUCT = """
func.func private @product(%x: {x}, %w: {w}, %chosen: {chosen}) -> {y} {{
  %zero = arith.constant 0.0 : f32
  %unset = tensor.empty() : {panels}
  %panels = linalg.pack %w {padding} {order} inner_dims_pos = [{dim}] inner_tiles = [{width}]
      into %unset : {w} -> {panels}
  %across = arith.constant {across} : index
  %count = arith.constant {count} : index
  %all = flow.dispatch.workgroups[%across, %count](%x, %panels, %chosen)
      : ({x}, {panels}, {chosen}) -> {whole} =
      (%xs: {read_x}, %ws: {read_panels}, %choices: {read_chosen}, %ys: {write_y}) {{
    %start = arith.constant 0.0 : f32
    %first = arith.constant 0 : index
    %width = arith.constant {width} : index
    %panel = flow.dispatch.workgroup.id[0] : index
    %block = flow.dispatch.workgroup.id[1] : index
    %choice = {load} %choices, offsets = [%block], sizes = [1], strides = [1]
        : {read_chosen} -> tensor<1xi64>
    %number = tensor.extract %choice[%first] : tensor<1xi64>
    %matrix = arith.index_cast %number : i64 to index
    %right = {load} %ws, offsets = [%matrix, %panel, 0, 0], sizes = [1, 1, {k}, {width}],
        strides = [1, 1, 1, 1] : {read_panels} -> {right}
    %left = {load} %xs, offsets = [%block, 0, 0], sizes = [1, {m}, {k}], strides = [1, 1, 1]
        : {read_x} -> {left}
    %empty = tensor.empty() : {part}
    %zeros = linalg.fill ins(%start : f32) outs(%empty : {part}) -> {part}
    %part = linalg.matmul {{compilation_info = {tiles}}}
        ins(%left, %right : {left}, {right}) outs(%zeros : {part}) -> {part}
    %column = arith.muli %panel, %width : index
    iree_tensor_ext.dispatch.tensor.store %part, %ys, offsets = [%block, 0, %column],
        sizes = [1, {m}, {width}], strides = [1, 1, 1] : {part} -> {write_y}
    flow.return
  }} count(%panels_there: index, %blocks_there: index) -> (index, index, index) {{
    %one = arith.constant 1 : index
    flow.return %panels_there, %blocks_there, %one : index, index, index
  }}
  {end}
}}
"""
_END = "return %all : {y}"
_END_PADDED = """
  %y = tensor.extract_slice %all[0, 0, 0] [{count}, {m}, {n}] [1, 1, 1] : {whole} to {y}
  return %y : {y}"""


def read_chosen(function: Any, features: Collection[str]) -> None:
    """Write products with chosen matrices such that these are not copied before.

    IREE copies the matrices that indices choose, packed, and multiplies by the copies: a mixture of
    experts writes and reads again what it should read once. Here a device program reads its index
    itself, and then the matrix; weights are packed once, at load.

    Before: %g[b, k, n] = %w[%i[b], k, n]                     with %w of [G, K, N], %i of [B]
            %y = linalg.batch_matmul ins(%x, %g)              with %x of [B, M, K]
    After:  %panels[g, n, k, l] = %w[g, k, 32 * n + l]
            %y[b, m, 32 * n + l] = sum over k of %x[b, m, k] * %panels[%i[b], n, k, l]

    Args:
        function: an entry point; its parameters are loads of globals.
        features: of the CPU that is compiled for, by LLVM's names.
    """
    if (block := best_for(features, _BLOCKS)) is None:
        return
    for op in ops_of(function):
        if (product := _product_of(op, block)) is not None:
            replace_by(op, product.text(), [product.x, product.choice.matrices, _indices(product)])


@dataclass(frozen=True)
class _Choice:
    """Matrices that are chosen from others.

    Attributes:
        reader: the op that copies them.
        matrices: what they are chosen from, `[G, K, N]`.
        is_transposed: whether that is `[G, N, K]`.
        index: the ops in the body of the reader that compute which, in order.
    """

    reader: Any
    matrices: Any
    is_transposed: bool
    index: Sequence[Any]


@dataclass(frozen=True)
class _Product:
    """A product with chosen matrices.

    Attributes:
        op: what computes it so far.
        sizes: B, M, K, N.
        block: rows, at most, and columns that registers hold.
        x: the other factor.
        choice: what is chosen.
    """

    op: Any
    sizes: tuple[int, int, int, int]
    block: tuple[int, int]
    x: Any
    choice: _Choice

    def text(self) -> str:
        """Write it."""
        (count, m, k, n), (rows, width) = self.sizes, self.block
        groups, across = self.choice.matrices.type.shape[0], -(-n // width)
        x, panels = floats(count, m, k), floats(groups, across, k, width)
        chosen = f"tensor<{count}xi64>"
        whole, y = floats(count, m, across * width), floats(count, m, n)
        is_padded = n % width != 0
        end = (_END_PADDED if is_padded else _END).format(count=count, m=m, n=n, whole=whole, y=y)
        return _PRODUCT.format(
            x=x,
            w=floats(groups, n, k) if self.choice.is_transposed else floats(groups, k, n),
            chosen=chosen,
            y=y,
            panels=panels,
            padding="padding_value(%zero : f32)" if is_padded else "",
            order="" if self.choice.is_transposed else "outer_dims_perm = [0, 2, 1]",
            dim=1 if self.choice.is_transposed else 2,
            width=width,
            across=across,
            count=count,
            m=m,
            k=k,
            tiles=tiles_of_product(min(rows, m), width),
            whole=whole,
            read_x=_READS.format(x),
            read_panels=_READS.format(panels),
            read_chosen=_READS.format(chosen),
            write_y=_WRITES.format(whole),
            load=_LOAD,
            left=floats(m, k),
            right=floats(k, width),
            part=floats(m, width),
            end=end,
        )


def _product_of(op: Any, block: tuple[int, int]) -> _Product | None:
    """Read an op off; None if it is no product of floats with chosen matrices.

    Of matrices that are no weights, all would be packed in each call: not if fewer are chosen.
    """
    if op.operation.name != "linalg.batch_matmul" or not is_plain(op.operation, rank=3):
        return None
    shapes, (x, w, start) = shapes_of(op), op.operands
    if shapes is None or not is_zeros(start) or (choice := _choice_of(w)) is None:
        return None
    if not choice.matrices.type.has_static_shape:
        return None
    (count, m, k), n = shapes[0], shapes[1][-1]
    groups = choice.matrices.type.shape[0]
    if 0 in (count, m, k, n, groups) or not (is_weight(choice.matrices) or count >= groups):
        return None
    return _Product(op, (count, m, k, n), block, x, choice)


def _choice_of(value: Any) -> _Choice | None:
    """Return what matrices are chosen from, before or after they are transposed."""
    before = transposed(value, rank=3)
    value = value if before is None else before
    if maker_of(value) != "linalg.generic" or not (index := _index_of(value.owner)):
        return None
    op = value.owner
    (read,) = (o for o in ops_of(op) if o.name == "tensor.extract")
    after = transposed(read.operands[0], rank=3)
    matrices = read.operands[0] if after is None else after
    return _Choice(op, matrices, (before is None) != (after is None), index)


def _index_of(op: Any) -> Sequence[Any]:
    """Return the ops that compute what an op reads whole matrices by; none if it does otherwise.

    It is `%y[b, i, j] = %w[f(%index[b]), i, j]`.
    """
    from iree.compiler import ir

    if len(inputs_of(op)) != 1 or len(op.results) != 1:
        return ()
    by_block, own = maps_of(op)
    body = op.regions[0].blocks[0]
    *_, end = body.operations
    reads = [inner for inner in body.operations if inner.operation.name == "tensor.extract"]
    if not (
        list(by_block.results) == [ir.AffineDimExpr.get(0)]
        and own == ir.AffineMap.get_identity(3)
        and len(reads) == 1
        and list(end.operands) == [reads[0].results[0]]
    ):
        return ()
    _, index, *others = reads[0].operands
    return _makers(index, body) if [*map(loop_of_index, others)] == [1, 2] else ()


def _makers(value: Any, body: Any) -> Sequence[Any]:
    """List the ops of a body that make a number of its first argument, in order.

    None of them if there are others than arithmetic.
    """
    needed, makers = {value}, []
    for op in reversed([inner.operation for inner in body.operations]):
        if not needed.intersection(op.results):
            continue
        if not op.name.startswith("arith."):
            return ()
        makers.append(op)
        needed.update(op.operands)
    inside = [v for v in needed if v.owner == body]
    return makers[::-1] if inside == [body.arguments[0]] else ()


def _indices(product: _Product) -> Any:
    """Compute which matrices are chosen, before the product; return the value."""
    from iree.compiler import ir

    choice = product.choice
    given, body = choice.reader.operands[0], choice.reader.regions[0].blocks[0]
    text = _CHOICE.format(count=product.sizes[0], kind=given.type.element_type)
    with ir.InsertionPoint(product.op), product.op.operation.location:
        (chosen,) = put(text, [given])
    block = chosen.owner.regions[0].blocks[0]
    (end,) = block.operations
    with ir.InsertionPoint(end), product.op.operation.location:
        values = clones(choice.index, {body.arguments[0]: block.arguments[0]})
        i64, index = ir.IntegerType.get_signless(64), values[choice.index[-1].results[0]]
        cast = ir.Operation.create("arith.index_cast", results=[i64], operands=[index])
    end.operation.operands[0] = cast.result
    return chosen

"""Write the product of a matrix and a vector so that the matrix is read as it lies in memory."""

from __future__ import annotations

from typing import Any

from lowering.stages.templates import replace_by

_LANES = 16  # floats of a cache line
# 64 rows a work item, 8 of them side by side, a cache line of each at a time.
_TILES = (
    "#iree_codegen.compilation_info<lowering_config = #iree_cpu.lowering_config<"
    "distribution = [64, 0, 0], vector_common_parallel = [8, 16, 0], vector_reduction = [0, 0, 1]>,"
    "translation_info = #iree_codegen.translation_info<"
    "pipeline = #iree_cpu.pipeline<DoubleTilingExpert>>>"
)
# `math.fma` with -0.0 is the product; `arith.mulf` would be taken for an outer product again.
_PRODUCT = """
func.func private @product(
    %w: tensor<{rows}x{width}xf32>, %x: tensor<{width}xf32>, %start: tensor<{rows}xf32>
) -> tensor<{rows}xf32> {{
  %zero = arith.constant 0.0 : f32
  %lines = tensor.expand_shape %w [[0], [1, 2]] output_shape [{rows}, {steps}, 16]
      : tensor<{rows}x{width}xf32> into tensor<{rows}x{steps}x16xf32>
  %factors = tensor.expand_shape %x [[0, 1]] output_shape [{steps}, 16]
      : tensor<{width}xf32> into tensor<{steps}x16xf32>
  %empty = tensor.empty() : tensor<{rows}x16xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<{rows}x16xf32>)
      -> tensor<{rows}x16xf32>
  %lanes = linalg.generic {{
      indexing_maps = [affine_map<(n, l, k) -> (n, k, l)>, affine_map<(n, l, k) -> (k, l)>,
                       affine_map<(n, l, k) -> (n, l)>],
      iterator_types = ["parallel", "parallel", "reduction"]}}
      ins(%lines, %factors : tensor<{rows}x{steps}x16xf32>, tensor<{steps}x16xf32>)
      outs(%zeros : tensor<{rows}x16xf32>) attrs = {{compilation_info = {tiles}}} {{
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %nothing = arith.constant -0.0 : f32
    %ab = math.fma %a, %b, %nothing : f32
    %next = arith.addf %sum, %ab : f32
    linalg.yield %next : f32
  }} -> tensor<{rows}x16xf32>
  %y = linalg.generic {{
      indexing_maps = [affine_map<(n, l) -> (n, l)>, affine_map<(n, l) -> (n)>],
      iterator_types = ["parallel", "reduction"]}}
      ins(%lanes : tensor<{rows}x16xf32>) outs(%start : tensor<{rows}xf32>) {{
  ^bb0(%lane: f32, %sum: f32):
    %next = arith.addf %sum, %lane : f32
    linalg.yield %next : f32
  }} -> tensor<{rows}xf32>
  return %y : tensor<{rows}xf32>
}}
"""


def read_by_rows(function: Any) -> None:
    """Add up each product of a matrix of floats and a vector in 16 lanes, and these at the end.

    Left to itself, IREE packs the matrix, and reads it as one stream, which many memories are slow
    at. Told not to, it takes 16 rows and columns at a time for an outer product: it transposes them
    in registers and adds up the columns one after the other, which takes longer than the memory
    does. Here nothing is moved, and no sum waits for another: 268 MB are read at 27.6 GB/s instead
    of 22.9 (two cores of a Granite Rapids; MKL 28.2).

    Before: %y = linalg.matvec ins(%w, %x)                                 with %w of [N, K]
    After:  %lanes[n, l] = sum over k of %w[n, k, l] * %x[k, l]            with %w of [N, K/16, 16]
            %y[n] = sum over l of %lanes[n, l]
    """
    from iree.compiler import ir

    for op in list(function.regions[0].blocks[0].operations):
        if op.operation.name != "linalg.matvec":
            continue
        kind = ir.RankedTensorType(op.operands[0].type)
        if str(kind.element_type) != "f32" or not kind.has_static_shape:
            continue
        rows, width = kind.shape
        if rows and width and width % _LANES == 0:
            text = _PRODUCT.format(rows=rows, width=width, steps=width // _LANES, tiles=_TILES)
            replace_by(op, text, list(op.operands))

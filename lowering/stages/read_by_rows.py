"""Write the product of a matrix and a vector so that the matrix is read as it lies in memory."""

from __future__ import annotations

from typing import Any

from lowering.stages.dispatch_work import walk
from lowering.stages.templates import floats, replace_by

_LANES = 16  # floats of a cache line
_BY_ROWS = "npu_iree.by_rows"
# `math.fma` with -0.0 is the product; `arith.mulf` would be taken for a matrix product again.
_ADD = """{
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %nothing = arith.constant -0.0 : f32
    %ab = math.fma %a, %b, %nothing : f32
    %next = arith.addf %sum, %ab : f32
    linalg.yield %next : f32
  }"""
_ADDS = ["math.fma", "arith.addf", "linalg.yield"]
_PRODUCT = """
func.func private @product(%w: {w}, %x: {x}, %start: {y}) -> {y} {{
  %y = linalg.generic {{
      indexing_maps = [affine_map<(n, k) -> (n, k)>, affine_map<(n, k) -> (k)>,
                       affine_map<(n, k) -> (n)>],
      iterator_types = ["parallel", "reduction"]}}
      ins(%w, %x : {w}, {x}) outs(%start : {y}) attrs = {{{mark}}} {add} -> {y}
  return %y : {y}
}}
"""
# 8 rows side by side, a cache line of each at a time. So many are a work item: IREE's task system
# hands out 8 items at a time (`iree/task/tuning.h`), and with larger ones a worker that woke late
# finds nothing left of a small matrix, or the last has most of it to itself.
_IN_LANES = """
#rows = #iree_codegen.compilation_info<
    lowering_config = #iree_cpu.lowering_config<
        distribution = [8, 0], vector_common_parallel = [8, 0]>,
    translation_info = #iree_codegen.translation_info<
        pipeline = #iree_cpu.pipeline<DoubleTilingExpert>>>
#lines = #iree_cpu.lowering_config<vector_reduction = [0, 0, 1]>
func.func private @product(%w: {w}, %x: {x}, %start: {y}) -> {y} {{
  %split_w = tensor.expand_shape %w [[0], [1, 2]] output_shape {w_lines} : {w} into {split_w}
  %split_x = tensor.expand_shape %x [[0, 1]] output_shape {x_lines} : {x} into {split_x}
  %unset = tensor.empty() : {lanes}
  %zero = arith.constant 0.0 : f32
  %zeros = linalg.fill ins(%zero : f32) outs(%unset : {lanes}) -> {lanes}
  %lanes = linalg.generic {{
      indexing_maps = [affine_map<(n, l, k) -> (n, k, l)>, affine_map<(n, l, k) -> (k, l)>,
                       affine_map<(n, l, k) -> (n, l)>],
      iterator_types = ["parallel", "parallel", "reduction"]}}
      ins(%split_w, %split_x : {split_w}, {split_x}) outs(%zeros : {lanes})
      attrs = {{lowering_config = #lines}} {add} -> {lanes}
  %y = linalg.generic {{
      indexing_maps = [affine_map<(n, l) -> (n, l)>, affine_map<(n, l) -> (n)>],
      iterator_types = ["parallel", "reduction"]}}
      ins(%lanes : {lanes}) outs(%start : {y}) attrs = {{compilation_info = #rows}} {{
  ^bb0(%lane: f32, %sum: f32):
    %next = arith.addf %sum, %lane : f32
    linalg.yield %next : f32
  }} -> {y}
  return %y : {y}
}}
"""


def read_by_rows(function: Any) -> None:
    """Mark the products of a matrix of floats and a vector that are to be added up in lanes.

    As reductions of one loop, they take what is computed of their results into their device
    programs; how these add up is written when they are formed (`add_in_lanes`).

    Before: %y = linalg.matvec ins(%w, %x)                                 with %w of [N, K]
    After:  %y[n] = sum over k of %w[n, k] * %x[k]
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
            replace_by(op, _write(_PRODUCT, rows, width), list(op.operands))


def add_in_lanes(module: Any) -> None:
    """Add up each marked product in 16 lanes, and these at the end.

    Left to itself, IREE packs the matrix, and reads it as one stream, which many memories are slow
    at. Told not to, it takes 16 rows and columns at a time for an outer product: it transposes them
    in registers and adds up the columns one after the other, which takes longer than the memory
    does. Here nothing is moved, and no sum waits for another: 268 MB are read at 27.6 GB/s instead
    of 22.9 (two cores of a Granite Rapids; MKL 28.2).

    Before: %y[n] = sum over k of %w[n, k] * %x[k]                         with %w of [N, K]
    After:  %lanes[n, l] = sum over k of %w[n, k, l] * %x[k, l]            with %w of [N, K/16, 16]
            %y[n] = sum over l of %lanes[n, l]

    Args:
        module: one in flow, its dispatches formed: IREE would make two of such sums before that.
    """
    from iree.compiler import ir

    for op in [op for op in walk(module) if _BY_ROWS in op.attributes]:
        if _is_as_marked(op):
            rows, width = ir.RankedTensorType(op.operands[0].type).shape
            replace_by(op, _write(_IN_LANES, rows, width), list(op.operands))


def _is_as_marked(op: Any) -> bool:
    """Say whether IREE has fused nothing into a product: no other op, no other order."""
    from iree.compiler import ir

    n, k = ir.AffineDimExpr.get(0), ir.AffineDimExpr.get(1)
    maps = [list(ir.AffineMapAttr(a).value.results) for a in op.attributes["indexing_maps"]]
    body = [inner.operation.name for inner in op.regions[0].blocks[0].operations]
    return maps == [[n, k], [k], [n]] and [b for b in body if b != "arith.constant"] == _ADDS


def _write(template: str, rows: int, width: int) -> str:
    steps = width // _LANES
    return template.format(
        w=floats(rows, width),
        x=floats(width),
        y=floats(rows),
        w_lines=[rows, steps, _LANES],
        x_lines=[steps, _LANES],
        split_w=floats(rows, steps, _LANES),
        split_x=floats(steps, _LANES),
        lanes=floats(rows, _LANES),
        mark=_BY_ROWS,
        add=_ADD,
    )

"""Write the gradient of a weight in groups as sums over places, with channels last."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from lowering.cpu import best_for
from lowering.stages.ir.barrier import behind_barrier
from lowering.stages.ir.convolutions import BLOCKS_OF_A_ROW, IN_GROUPS, without_ones
from lowering.stages.ir.factors import shapes_of
from lowering.stages.ir.structured import is_zeros
from lowering.stages.ir.symbols import inside
from lowering.stages.ir.templates import put
from lowering.stages.ir.tensors import reordered, reshaped
from lowering.stages.ir.types import floats

# Beside the sums: channels and features that registers hold, rows and columns of a step of the
# window, and of a place of the gradient.
MARK = "npu_iree.weight_gradient"
# {n} are the images: if there is one, it is no dimension.
_SUMS = """
func.func private @sums(%x: {x}, %gradient: {gradient}) -> {sums} {{
  %zero = arith.constant 0.0 : f32
  %unset = tensor.empty() : {sums}
  %zeros = linalg.fill ins(%zero : f32) outs(%unset : {sums}) -> {sums}
  %sums = linalg.generic {{
      indexing_maps = [affine_map<({loops}) -> ({n}{row}, {column}, g * {channels} + c)>,
                       affine_map<({loops}) -> ({n}h, w, g * {features} + f)>,
                       affine_map<({loops}) -> (i, j, g, c, f)>],
      iterator_types = ["parallel", "parallel", "parallel", "parallel", "parallel", {reductions}]}}
      ins(%x, %gradient : {x}, {gradient}) outs(%zeros : {sums}) attrs = {{{mark}}} {{
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %ab = arith.mulf %a, %b : f32
    %next = arith.addf %sum, %ab : f32
    linalg.yield %next : f32
  }} -> {sums}
  return %sums : {sums}
}}
"""


def mark_weight_gradients(function: Any, features: Collection[str]) -> None:
    """Write the gradient of a weight in groups such that vectors read features and channels.

    It comes as a convolution of channels by the gradient, with the images as what it sums
    (`lowering.decompositions.convolution`), which IREE computes number by number (4 groups of 16
    channels, two images of 28x28: 0.5 ms instead of 17; two cores of an EPYC, Zen 3).

    Before: %y = linalg.conv_2d_ngchw_gfchw ins(%x, %d)   with %x of [C, G, N, ...], %d of
                                                               [G, F, N, H, W], %y of [C, G, F, ...]
    After:  %sums[i, j, g, c, f] = sum over n, h, w of
                %x[n, stride * h + i, stride * w + j, g * C + c] * %d[n, h, w, g * F + f]
            %y = transpose %sums [3, 2, 4, 0, 1]

    Args:
        function: an entry point.
        features: of the CPU that is compiled for, by LLVM's names.
    """
    from iree.compiler import ir

    for op in inside(function, IN_GROUPS):
        if (block := _block_of(op, features)) is not None:
            with ir.InsertionPoint(op), op.operation.location:
                op.operation.results[0].replace_all_uses_with(_written(op, block))
            op.operation.erase()


def _block_of(op: Any, features: Collection[str]) -> tuple[int, int] | None:
    """Return how many channels and features registers hold; None if it is no such gradient."""
    if (shapes := shapes_of(op)) is None or not is_zeros(op.operands[2]):
        return None
    (channels, groups, *_), (_, made, _, *places), (*_, height, width) = shapes
    # IREE takes dimensions of one element out of device programs.
    if min(channels, groups, made, *places, height, width) < 2:
        return None
    if math.prod(places) <= height * width:  # a convolution of images
        return None
    for most, columns in best_for(features, BLOCKS_OF_A_ROW):
        if made % columns == 0:
            return max(n for n in range(1, most + 1) if channels % n == 0), columns
    return None


def _written(op: Any, block: tuple[int, int]) -> Any:
    """Write the sums at the insertion point; return them as the op has them, `[C, G, F, ...]`."""
    image, gradient, _ = op.operands
    channels, groups, made, height, width = op.result.type.shape
    x, by = (_channels_last(image, [2, 3, 4, 1, 0]), _channels_last(gradient, [2, 3, 4, 0, 1]))
    stride, apart = ([int(n) for n in op.attributes[name]] for name in ("dilations", "strides"))
    row, column = (
        f"{there} * {step} + {place} * {between}"
        for there, step, place, between in zip("hw", stride, "ij", apart, strict=True)
    )
    n = "n, " if len(x.type.shape) > 3 else ""
    text = _SUMS.format(
        x=x.type,
        gradient=by.type,
        sums=floats(height, width, groups, channels, made),
        loops=f"i, j, g, c, f, {n}h, w",
        n=n,
        row=row,
        column=column,
        channels=channels,
        features=made,
        reductions=", ".join(['"reduction"'] * (3 if n else 2)),
        mark=f"{MARK} = array<i64: {', '.join(map(str, [*block, *stride, *apart]))}>",
    )
    (sums,) = put(text, [x, by])
    return reordered(behind_barrier(sums), [3, 2, 4, 0, 1])


def _channels_last(value: Any, order: list[int]) -> Any:
    """Put channels last, `[N, H, W, G * C]`, or `[H, W, G * C]` of one image, apart."""
    last = reordered(value, order)
    *sizes, groups, channels = last.type.shape
    whole = reshaped(last, [*sizes, groups * channels], [[0], [1], [2], [3, 4]])
    return behind_barrier(without_ones(whole))

"""Have the weight of a convolution transposed apart from it, where that is not done at load."""

from __future__ import annotations

from typing import Any

from lowering.stages.factors import is_weight
from lowering.stages.templates import replace_by

_CONVOLUTION = """
func.func private @convolution(%x: {x}, %w: {w}, %start: {y}) -> {y} {{
  %x_empty = tensor.empty() : {x_last}
  %x_last = linalg.transpose ins(%x : {x}) outs(%x_empty : {x_last}) permutation = [0, 2, 3, 1]
  %w_empty = tensor.empty() : {w_last}
  %w_last = linalg.transpose ins(%w : {w}) outs(%w_empty : {w_last}) permutation = [2, 3, 1, 0]
  %x_apart = util.optimization_barrier %x_last : {x_last}
  %w_apart = util.optimization_barrier %w_last : {w_last}
  %y_empty = tensor.empty() : {y_last}
  %begin = linalg.transpose ins(%start : {y}) outs(%y_empty : {y_last}) permutation = [0, 2, 3, 1]
  %sums = linalg.conv_2d_nhwc_hwcf {{dilations = {dilations}, strides = {strides}}}
      ins(%x_apart, %w_apart : {x_last}, {w_last}) outs(%begin : {y_last}) -> {y_last}
  %empty = tensor.empty() : {y}
  %y = linalg.transpose ins(%sums : {y_last}) outs(%empty : {y}) permutation = [0, 3, 1, 2]
  return %y : {y}
}}
"""


def separate_weights(function: Any) -> None:
    """Put channels last in convolutions of images whose weight is no parameter.

    IREE does so itself (`iree-preprocessing-convert-conv-to-channels-last`), and then reads the
    weight where it lies, in its old order, number by number: in training, and of weights that a
    call is given, a convolution took 60 times as long as eager's. So it does with the image, once
    that stands apart from what makes it; hence the second barrier.

    Before: %y = linalg.conv_2d_nchw_fchw ins(%x, %w)
    After:  %0 = util.optimization_barrier (linalg.transpose %x [0, 2, 3, 1])
            %1 = util.optimization_barrier (linalg.transpose %w [2, 3, 1, 0])
            %y = linalg.transpose (linalg.conv_2d_nhwc_hwcf ins(%0, %1)) [0, 3, 1, 2]

    Args:
        function: an entry point; its parameters are loads of globals.
    """
    for op in list(function.regions[0].blocks[0].operations):
        if op.operation.name == "linalg.conv_2d_nchw_fchw" and not is_weight(op.operands[1]):
            _put_channels_last(op)


def _put_channels_last(op: Any) -> None:
    from iree.compiler import ir

    kinds = [ir.RankedTensorType(operand.type) for operand in op.operands]
    if not all(kind.has_static_shape for kind in kinds):
        return
    text = _CONVOLUTION.format(
        **dict(zip("xwy", map(str, kinds), strict=True)),
        x_last=_reordered(kinds[0], (0, 2, 3, 1)),
        w_last=_reordered(kinds[1], (2, 3, 1, 0)),
        y_last=_reordered(kinds[2], (0, 2, 3, 1)),
        dilations=op.attributes["dilations"],
        strides=op.attributes["strides"],
    )
    replace_by(op, text, list(op.operands))


def _reordered(kind: Any, order: tuple[int, ...]) -> str:
    sizes = "x".join(str(kind.shape[d]) for d in order)
    return f"tensor<{sizes}x{kind.element_type}>"

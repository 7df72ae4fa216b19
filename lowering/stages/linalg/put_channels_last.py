"""Put channels last in convolutions of images where IREE does not, or not well."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.barrier import behind_barrier
from lowering.stages.ir.factors import is_weight
from lowering.stages.ir.structured import is_transpose
from lowering.stages.ir.symbols import maker_of, ops_of
from lowering.stages.ir.templates import put
from lowering.stages.ir.tensors import TO_FIRST, TO_LAST, padded, reordered
from lowering.stages.ir.types import sizes_of

_CONVOLUTION = """
func.func @convolution(%x: {x}, %w: {w}, %y: {y}) -> {y} {{
  %sums = {op} {{dilations = {dilations}, strides = {strides}}}
      ins(%x, %w : {x}, {w}) outs(%y : {y}) -> {y}
  return %sums : {y}
}}
"""
_DENSE = "linalg.conv_2d_nchw_fchw"
# The op that has them last, and the order in which it reads the dimensions of its weight.
_LAST = {
    _DENSE: ("linalg.conv_2d_nhwc_hwcf", [2, 3, 1, 0]),
    "linalg.depthwise_conv_2d_nchw_chw": ("linalg.depthwise_conv_2d_nhwc_hwc", [1, 2, 0]),
}


def put_channels_last(function: Any) -> None:
    """Put channels last in convolutions of sizes that are not known, or whose weight is computed.

    And in those of each channel by itself (7x7 on 96 channels of 56x56: 1.0 ms instead of 6.5, two
    cores of an EPYC, Zen 3; eager 0.6). IREE does so of others itself
    (`iree-preprocessing-convert-conv-to-channels-last`). Of unknown sizes, it fails
    ("'tensor.empty' op incorrect number of dynamic sizes"), and what it makes of channels first
    takes 3 times as long as eager's (ResNet-18 of any batch; 32 times, of any height and width). Of
    a weight that is no parameter, it reads the weight where it lies, in its old order, number by
    number: in training, a convolution took 60 times as long as eager's. So it does with the image,
    once that stands apart from what makes it; hence the barriers.

    Before: %y = linalg.conv_2d_nchw_fchw ins(%x, %w)
    After:  %0 = util.optimization_barrier (linalg.transpose %x [0, 2, 3, 1])
            %1 = util.optimization_barrier (linalg.transpose %w [2, 3, 1, 0])
            %y = linalg.transpose (linalg.conv_2d_nhwc_hwcf ins(%0, %1)) [0, 3, 1, 2]

    Args:
        function: an entry point; its parameters are loads of globals, and transposed at load.
    """
    for op in ops_of(function):
        if op.name in _LAST and not _is_for_iree(op):
            _put_channels_last(op)


def _is_for_iree(op: Any) -> bool:
    sizes = [size for operand in op.operands for size in sizes_of(operand.type)]
    is_dense = op.name == _DENSE
    return is_dense and is_weight(op.operands[1]) and None not in sizes


def _put_channels_last(op: Any) -> None:
    from iree.compiler import ir

    image, weight, start = op.operands
    last, order = _LAST[op.operation.name]
    with ir.InsertionPoint(op), op.operation.location:
        x = _padded(image)
        x = behind_barrier(reordered(image, TO_LAST) if x is None else x)
        w = reordered(weight, order)
        if not is_weight(weight):
            w = behind_barrier(w)
        y = reordered(start, TO_LAST)
        text = _CONVOLUTION.format(
            op=last,
            dilations=op.attributes["dilations"],
            strides=op.attributes["strides"],
            x=x.type,
            w=w.type,
            y=y.type,
        )
        (sums,) = put(text, [x, w, y])
        op.operation.results[0].replace_all_uses_with(reordered(sums, TO_FIRST))
    op.operation.erase()


def _padded(value: Any) -> Any:
    """Pad an image with channels last, if it was, and its channels put first for that; or None."""
    if maker_of(value) != "tensor.pad":
        return None
    pad = value.owner
    first, *amounts = pad.operands
    if amounts or not is_transpose(first.owner, TO_FIRST):
        return None
    (block,) = pad.regions[0].blocks
    ending, *others = block.operations
    if others or ending.operands[0] in block.arguments:
        return None
    low, high = (
        [pad.attributes[name][d] for d in TO_LAST] for name in ("static_low", "static_high")
    )
    return padded(first.owner.operands[0], low, high, ending.operands[0])

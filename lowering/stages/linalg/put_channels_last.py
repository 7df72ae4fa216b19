"""Put channels last in convolutions of images where IREE does not, or not well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowering.stages.ir.barrier import put_barriers
from lowering.stages.ir.factors import is_weight
from lowering.stages.ir.symbols import maker_of
from lowering.stages.ir.templates import replace_by

# {..._empty} are the sizes that are not known, in the order of the new tensor.
_CONVOLUTION = """
func.func private @convolution(%x: {x}, %w: {w}, %y: {y}{more}) -> {y} {{
  {sizes}
  {x_made}
  %w_empty = tensor.empty({w_empty}) : {w_last}
  %w_last = linalg.transpose ins(%w : {w}) outs(%w_empty : {w_last}) permutation = {w_order}
  %y_empty = tensor.empty({y_empty}) : {y_last}
  %begin = linalg.transpose ins(%y : {y}) outs(%y_empty : {y_last}) permutation = [0, 2, 3, 1]
  %sums = {op} {{dilations = {dilations}, strides = {strides}}}
      ins(%x_last, %w_last : {x_last}, {w_last}) outs(%begin : {y_last}) -> {y_last}
  %empty = tensor.empty({y_sizes}) : {y}
  %first = linalg.transpose ins(%sums : {y_last}) outs(%empty : {y}) permutation = [0, 3, 1, 2]
  return %first : {y}
}}
"""
_MOVED = """
  %x_empty = tensor.empty({x_empty}) : {x_last}
  %x_last = linalg.transpose ins(%x : {x}) outs(%x_empty : {x_last}) permutation = [0, 2, 3, 1]
"""
# Of an image that has them last, and was padded with channels first.
_PADDED = """
  %x_last = tensor.pad %image low[{low}] high[{high}] {{
  ^bb0(%n: index, %h: index, %w_: index, %c: index):
    tensor.yield %fill : {element}
  }} : {image} to {x_last}
"""
# The op that has them last, and the order in which it reads the dimensions of its weight.
_LAST = {
    "linalg.conv_2d_nchw_fchw": ("linalg.conv_2d_nhwc_hwcf", [2, 3, 1, 0]),
    "linalg.depthwise_conv_2d_nchw_chw": ("linalg.depthwise_conv_2d_nhwc_hwc", [1, 2, 0]),
}


def put_channels_last(function: Any) -> None:
    """Put channels last in convolutions of sizes that are not known, or whose weight is computed.

    IREE does so of others itself (`iree-preprocessing-convert-conv-to-channels-last`). Of unknown
    sizes, it fails ("'tensor.empty' op incorrect number of dynamic sizes"), and what it makes of
    channels first takes 3 times as long as eager's (ResNet-18 of any batch; 32 times, of any height
    and width). Of a weight that is no parameter, it reads the weight where it lies, in its old
    order, number by number: in training, a convolution took 60 times as long as eager's. So it does
    with the image, once that stands apart from what makes it; hence the barriers.

    Before: %y = linalg.conv_2d_nchw_fchw ins(%x, %w)
    After:  %0 = util.optimization_barrier (linalg.transpose %x [0, 2, 3, 1])
            %1 = util.optimization_barrier (linalg.transpose %w [2, 3, 1, 0])
            %y = linalg.transpose (linalg.conv_2d_nhwc_hwcf ins(%0, %1)) [0, 3, 1, 2]

    Args:
        function: an entry point; its parameters are loads of globals, and transposed at load.
    """
    for op in list(function.regions[0].blocks[0].operations):
        if op.operation.name in _LAST and not _is_for_iree(op):
            _put_channels_last(op)


def _is_for_iree(op: Any) -> bool:
    from iree.compiler import ir

    kinds = [ir.RankedTensorType(operand.type) for operand in op.operands]
    return is_weight(op.operands[1]) and all(kind.has_static_shape for kind in kinds)


def _put_channels_last(op: Any) -> None:
    from iree.compiler import ir

    text = {name: op.attributes[name] for name in ("dilations", "strides")}
    text["op"], text["w_order"] = _LAST[op.operation.name]
    orders = {"x": [0, 2, 3, 1], "w": text["w_order"], "y": [0, 2, 3, 1]}
    sizes = list[str]()
    for (name, order), operand in zip(orders.items(), op.operands, strict=True):
        kind = ir.RankedTensorType(operand.type)
        unknown = [d for d in range(kind.rank) if kind.is_dynamic_dim(d)]
        for d in unknown:
            sizes.append(f"%{name}_{d} = arith.constant {d} : index")
            sizes.append(f"%{name}{d} = tensor.dim %{name}, %{name}_{d} : {kind}")
        last = _reordered(kind, order)
        text[name], text[f"{name}_last"] = kind, last
        text[f"{name}_sizes"] = ", ".join(f"%{name}{d}" for d in unknown)
        text[f"{name}_empty"] = ", ".join(f"%{name}{d}" for d in order if d in unknown)
    pad, arguments = _pad_of(op.operands[0]), list(op.operands)
    text["more"], text["x_made"] = "", _MOVED.format(**text)
    if pad is not None:
        text["more"] = f", %image: {pad.image.type}, %fill: {pad.fill.type}"
        text["x_made"] = _PADDED.format(
            low=pad.low, high=pad.high, image=pad.image.type, element=pad.fill.type, **text
        )
        arguments += [pad.image, pad.fill]
    apart = [0] if is_weight(op.operands[1]) else [0, 1]
    first = replace_by(op, _CONVOLUTION.format(sizes="\n  ".join(sizes), **text), arguments)
    put_barriers(first.owner.operands[0].owner, apart)


@dataclass(frozen=True)
class _Pad:
    """What an image with channels last is padded with."""

    image: Any
    fill: Any
    low: str
    high: str


def _pad_of(value: Any) -> _Pad | None:
    """Return how a value was padded that had its channels put first for that; else None."""
    if maker_of(value) != "tensor.pad":
        return None
    pad = value.owner
    image, *amounts = pad.operands
    if amounts or maker_of(image) != "linalg.transpose":
        return None
    if list(image.owner.attributes["permutation"]) != [0, 3, 1, 2]:
        return None
    (block,) = pad.regions[0].blocks
    ending, *others = block.operations
    if others or ending.operands[0] in block.arguments:
        return None
    low, high = (
        ", ".join(str(pad.attributes[name][d]) for d in (0, 2, 3, 1))
        for name in ("static_low", "static_high")
    )
    return _Pad(image.owner.operands[0], ending.operands[0], low, high)


def _reordered(kind: Any, order: Sequence[int]) -> str:
    sizes = ["?" if kind.is_dynamic_dim(d) else str(kind.shape[d]) for d in order]
    return f"tensor<{'x'.join(sizes)}x{kind.element_type}>"

"""Write what transposes the second factors of products as the last that is done to them."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.factors import is_plain
from lowering.stages.ir.symbols import maker_of, ops_of
from lowering.stages.ir.tensors import reordered

_PRODUCT, _COLLAPSE, _TRANSPOSE = "linalg.batch_matmul", "tensor.collapse_shape", "linalg.transpose"


def transpose_last(function: Any) -> None:
    """Move matrices as they are, and transpose them where they are multiplied.

    A product reads its factor in either order, or packs it so; IREE knows this of what it sees
    transposed right before. What moves whole matrices and transposes them, such as the keys of
    attention, is a device program that takes numbers one by one if there are unknown sizes.

    Before: %keys = linalg.transpose %x permutation = [0, 2, 3, 1]             [B, S, H, D] to BHDS
            %stack = tensor.collapse_shape %keys [[0, 1], [2], [3]]
            %y = linalg.batch_matmul(%queries, %stack)
    After:  %moved = linalg.transpose %x permutation = [0, 2, 1, 3]                         to BHSD
            %rows = tensor.collapse_shape %moved [[0, 1], [2], [3]]
            %stack = linalg.transpose %rows permutation = [0, 2, 1]
    """
    for op in ops_of(function):
        if op.name == _PRODUCT and is_plain(op, 3):
            _turn_factor(op)


def _turn_factor(product: Any) -> None:
    from iree.compiler import ir

    stack = product.operands[1]
    if maker_of(stack) != _COLLAPSE or maker_of(stack.owner.operands[0]) != _TRANSPOSE:
        return
    collapse, keys = stack.owner, stack.owner.operands[0].owner
    order, groups = list(keys.attributes["permutation"]), collapse.attributes["reassociation"]
    if [len(group) for group in groups][1:] != [1, 1] or order[-2] != len(order) - 1:
        return
    kind = ir.RankedTensorType(stack.type)
    first, *matrix = kind.shape
    rows = ir.RankedTensorType.get([first, *reversed(matrix)], kind.element_type)
    with ir.InsertionPoint(product), keys.location:
        moved = reordered(keys.operands[0], [*order[:-2], order[-1], order[-2]])
        merged = ir.Operation.create(
            _COLLAPSE, results=[rows], operands=[moved], attributes={"reassociation": groups}
        )
        product.operands[1] = reordered(merged.result, [0, 2, 1])

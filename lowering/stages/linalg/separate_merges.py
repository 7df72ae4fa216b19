"""Keep IREE from packing what it computes with dimensions that it merges, if sizes vary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowering.stages.ir.barrier import put_barriers
from lowering.stages.ir.structured import (
    RESHAPES,
    inputs_of,
    is_elementwise,
    makes_factor,
    products_of,
)
from lowering.stages.ir.symbols import maker_of, ops_of, origin_of
from lowering.stages.ir.types import sizes_of


def separate_merges(function: Any) -> None:
    """Put a barrier before a merge of dimensions of a dynamic tensor that makes a factor.

    IREE would compute, merge and pack in one device program, in loops over sizes that it finds by
    division, and refuses its own code ("'affine.delinearize_index' op no basis element may be
    statically non-positive", "all stack allocations need to be hoisted"): the heads of attention,
    transposed, for any number of texts, and what is behind a softmax in the output's product, for
    one text of any length, too.

    So is there one before what was computed earlier and is added to the product. IREE would pack it
    where it is computed, with sizes that it takes from the factor, which is not yet there ("failed
    without a word"): the sum at the end of a block of ConvNeXt.

    Before: %y = tensor.collapse_shape %x [[0, 1], [2], [3]] : tensor<?x4x?x16xf32>
            %z = linalg.batch_matmul ins(%y, ...); linalg.generic { addf } ins(%z, %a)
    After:  %b = util.optimization_barrier %x; %y = tensor.collapse_shape %b ...
            %z = linalg.batch_matmul ins(%y, ...); %c = util.optimization_barrier %a
            linalg.generic { addf } ins(%z, %c)
    """
    ops = ops_of(function)
    places = {op: place for place, op in enumerate(ops)}
    for op in ops:
        if op.name != "tensor.collapse_shape" or not _merges(op):
            continue
        if maker_of(op.operands[0]).startswith("linalg.") and makes_factor(op.results[0]):
            put_barriers(op, [0])
            for product in products_of(op.results[0]):
                _separate_addends(product, places)


def _separate_addends(product: Any, places: Mapping[Any, int]) -> None:
    """Put a barrier before what is computed with a product, and was computed before it.

    Args:
        product: the product.
        places: where in the function each op stands.
    """
    for op in _followers(product.results[0]):
        others = []
        for place, operand in enumerate(inputs_of(op)):
            operand = origin_of(operand, RESHAPES)
            is_computed = maker_of(operand).startswith("linalg.")
            if not is_computed or None not in sizes_of(operand.type):
                continue
            if places.get(operand.owner, len(places)) < places[product]:
                others.append(place)
        put_barriers(op, others)


def _followers(value: Any) -> list[Any]:
    """Return what computes number by number with a value, and with what they make, and so on."""
    found, values = dict[Any, None](), [value]
    while values:
        users = [use.owner.operation for use in values.pop().uses]
        for user in users:
            if user not in found and (is_elementwise(user) or user.name in RESHAPES):
                found[user] = None
                values += user.results
    return [op for op in found if is_elementwise(op)]


def _merges(merge: Any) -> bool:
    sizes = sizes_of(merge.operands[0].type)
    groups = [[sizes[d.value] for d in group] for group in merge.attributes["reassociation"]]
    return None in sizes and any(sum(size != 1 for size in group) > 1 for group in groups)

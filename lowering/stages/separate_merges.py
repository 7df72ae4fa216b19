"""Keep IREE from packing what it computes with dimensions that it merges, if sizes vary."""

from __future__ import annotations

from typing import Any

from lowering.stages.barrier import put_barriers
from lowering.stages.dispatch_work import sizes_of
from lowering.stages.structured import makes_factor
from lowering.stages.symbols import maker_of


def separate_merges(function: Any) -> None:
    """Put a barrier before a merge of dimensions of a dynamic tensor that makes a factor.

    IREE would compute, merge and pack in one device program, in loops over sizes that it finds by
    division, and refuses its own code ("'affine.delinearize_index' op no basis element may be
    statically non-positive", "all stack allocations need to be hoisted"): the heads of attention,
    transposed, for any number of texts, and what is behind a softmax in the output's product, for
    one text of any length, too.

    Before: %y = tensor.collapse_shape %x [[0, 1], [2], [3]] : tensor<?x4x?x16xf32>
            linalg.batch_matmul ins(%y, ...)
    After:  %b = util.optimization_barrier %x; %y = tensor.collapse_shape %b ...
    """
    for op in list(function.regions[0].blocks[0].operations):
        if op.operation.name != "tensor.collapse_shape" or not _merges(op):
            continue
        if maker_of(op.operands[0]).startswith("linalg.") and makes_factor(op.results[0]):
            put_barriers(op, [0])


def _merges(merge: Any) -> bool:
    sizes = sizes_of(merge.operands[0].type)
    groups = [[sizes[d.value] for d in group] for group in merge.attributes["reassociation"]]
    return None in sizes and any(sum(size != 1 for size in group) > 1 for group in groups)

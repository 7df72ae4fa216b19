"""Ops along a dimension of a tensor that has none: PyTorch takes it for one element in a row.

torch-mlir and IREE do not, so the tensor is given that dimension, and the result loses it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from lowering.decompositions.tables import Decomposition, Table, left_whole

aten = torch.ops.aten

# op -> the place of the argument that has as many dimensions as the result.
ALONG_A_DIMENSION: dict[torch._ops.OpOverload, int] = {
    aten._log_softmax.default: 0,
    aten._softmax.default: 0,
    aten.amax.default: 0,
    aten.amin.default: 0,
    aten.argmax.default: 0,
    aten.argmin.default: 0,
    aten.cumprod.default: 0,
    aten.cumsum.default: 0,
    aten.gather.default: 2,
    aten.index_select.default: 0,
    aten.max.dim: 0,
    aten.min.dim: 0,
    aten.scatter.src: 0,
    aten.scatter.value: 0,
    aten.scatter_add.default: 0,
    aten.scatter_reduce.two: 0,
    aten.sort.default: 0,
    aten.sort.stable: 0,
    aten.topk.default: 0,
}


def with_scalars(table: Table) -> Table:
    """Return decompositions of the ops above, each before what a table has for it.

    Before: %1 = aten.cumsum(%0, 0)                              with %0 of []
    After:  %1 = view(%0, [1]); %2 = aten.cumsum(%1, 0); %3 = view(%2, [])
    """
    return {
        op: _lifting(op, place, table.get(op, left_whole))
        for op, place in ALONG_A_DIMENSION.items()
    }


def _lifting(op: Any, place: int, otherwise: Decomposition) -> Decomposition:
    def decomposed(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim():
            return otherwise(x, *args, **kwargs)
        lifted = pytree.tree_map_only(torch.Tensor, _lifted, (x, *args))
        results = op(*lifted, **kwargs)
        if (x, *args)[place].dim():
            return results
        return pytree.tree_map_only(torch.Tensor, lambda t: t.reshape(()), results)

    return decomposed


def _lifted(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() else tensor.reshape(1)

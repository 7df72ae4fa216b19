"""Ops on halves that PyTorch computes in floats, and torch-mlir in halves.

A sum of a thousand elements in bf16 loses its last hundreds, a running one stands still; a power or
a remainder loses digits. So they are computed in f32, as PyTorch's kernels do, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

aten = torch.ops.aten
_UNCHANGED: Any = NotImplemented  # PyTorch then keeps the op whole
HALVES = (torch.float16, torch.bfloat16)
Decomposition = Callable[..., Any]

IN_FLOATS: tuple[torch._ops.OpOverload, ...] = (
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten._log_softmax.default,
    aten._softmax.default,
    aten.acosh.default,
    aten.asinh.default,
    aten.atan2.default,
    aten.atanh.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d.default,
    aten.avg_pool3d_backward.default,
    aten.cos.default,
    aten.cumprod.default,
    aten.cumsum.default,
    aten.div.Tensor_mode,
    aten.elu.default,
    aten.exp2.default,
    aten.floor_divide.default,
    aten.fmod.Tensor,
    aten.hypot.default,
    aten.linalg_vector_norm.default,
    aten.log10.default,
    aten.logaddexp.default,
    aten.logaddexp2.default,
    aten.mean.default,
    aten.mean.dim,
    aten.norm.ScalarOpt_dim,
    aten.pow.Scalar,
    aten.pow.Tensor_Scalar,
    aten.pow.Tensor_Tensor,
    aten.prod.default,
    aten.prod.dim_int,
    aten.remainder.Tensor,
    aten.sin.default,
    aten.sinh.default,
    aten.sum.default,
    aten.sum.dim_IntList,
)


def with_halves(
    table: dict[torch._ops.OpOverload, Decomposition],
) -> dict[torch._ops.OpOverload, Decomposition]:
    """Return decompositions of the ops above, each before what a table has for it.

    Before: %1 = aten.sum(%0, [1])                                    with %0 of bf16
    After:  %1 = convert(%0, f32); %2 = aten.sum(%1, [1]); %3 = convert(%2, bf16)
    """
    return {op: _widening(op, table.get(op)) for op in IN_FLOATS}


def _widening(op: Any, otherwise: Decomposition | None) -> Decomposition:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        dtypes = {t.dtype for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)}
        half = next(iter(dtypes.intersection(HALVES)), None)
        if half is None or torch.float32 in dtypes or torch.float64 in dtypes:
            return otherwise(*args, **kwargs) if otherwise else _UNCHANGED
        dtype = kwargs.get("dtype")
        if dtype in HALVES:
            kwargs = {**kwargs, "dtype": None}
        result = op(*pytree.tree_map_only(torch.Tensor, widened, args), **kwargs)
        return result.to(dtype or half)

    return decomposed


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return halves as f32, and any other tensor as it is."""
    return tensor.float() if tensor.dtype in HALVES else tensor

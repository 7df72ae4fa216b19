"""Ops on halves that PyTorch computes in floats, and torch-mlir in halves.

A sum of a thousand elements in bf16 loses its last hundreds, a running one stands still; a power or
a remainder loses digits, and 0.1 is 0.1001 in bf16. So they are computed in f32, as PyTorch's
kernels do, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

aten = torch.ops.aten
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
    aten.atan.default,
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
    aten.leaky_relu.default,
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
    aten.tan.default,
)

# So are these where the number that they take is no half; sums take the half next to it.
WITH_NUMBERS: tuple[torch._ops.OpOverload, ...] = (
    aten.div.Scalar,
    aten.div.Tensor,
    aten.lerp.Scalar,
    aten.mul.Scalar,
    aten.mul.Tensor,
)


def with_halves(
    table: dict[torch._ops.OpOverload, Decomposition],
) -> dict[torch._ops.OpOverload, Decomposition]:
    """Return decompositions of the ops above, each before what a table has for it.

    Before: %1 = aten.sum(%0, [1])                                    with %0 of bf16
    After:  %1 = convert(%0, f32); %2 = aten.sum(%1, [1]); %3 = convert(%2, bf16)
    """
    return {
        **{op: _widening(op, table.get(op)) for op in IN_FLOATS},
        **{op: _widening(op, table.get(op), with_number=True) for op in WITH_NUMBERS},
    }


def _widening(
    op: Any, otherwise: Decomposition | None, *, with_number: bool = False
) -> Decomposition:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        half = _half(pytree.tree_leaves((args, kwargs)))
        if half is None or (with_number and not any(_is_finer(arg, half) for arg in args[1:])):
            return otherwise(*args, **kwargs) if otherwise else NotImplemented
        dtype = kwargs.get("dtype")
        if dtype in HALVES:
            kwargs = {**kwargs, "dtype": None}
        result = op(*pytree.tree_map_only(torch.Tensor, _in_floats, args), **kwargs)
        return result.to(dtype or half)

    return decomposed


def _half(leaves: list[Any]) -> torch.dtype | None:
    """Return the half that an op of floats is computed in: one of no dimensions is a number beside.

    Source: https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    floats = [t for t in tensors if t.is_floating_point()]
    if any(isinstance(leaf, complex) for leaf in leaves) or any(t.is_complex() for t in tensors):
        return None
    of_dimensions = {t.dtype for t in floats if t.dim()} or {t.dtype for t in floats}
    if len(of_dimensions) != 1:
        return None
    return next((dtype for dtype in of_dimensions if dtype in HALVES), None)


def _is_finer(factor: Any, half: torch.dtype) -> bool:
    """Say whether a factor is a number, of Python or of no dimensions, that may be no half."""
    if isinstance(factor, torch.Tensor):
        return factor.dim() == 0 and factor.dtype not in (half, torch.bool)
    if isinstance(factor, (torch.SymFloat, torch.SymInt)):
        return True
    if not isinstance(factor, (int, float)) or factor == 0:
        return False
    info = torch.finfo(half)
    is_normal = info.tiny <= abs(factor) <= info.max
    return not is_normal or math.frexp(factor)[0] * 2 / info.eps % 1 != 0


def _in_floats(tensor: torch.Tensor) -> torch.Tensor:
    """Return any float as f32: beside a double without dimensions, ops are computed in doubles."""
    return tensor.float() if tensor.is_floating_point() else tensor


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return halves as f32, and any other tensor as it is."""
    return tensor.float() if tensor.dtype in HALVES else tensor

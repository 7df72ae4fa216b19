"""Ops on halves that PyTorch computes in floats, and torch-mlir in halves.

A sum of a thousand elements in bf16 loses its last hundreds, a running one stands still; a power or
a remainder loses digits. So they are computed in f32, as PyTorch's kernels do, and rounded once.

What is no half beside halves is first rounded to it (0.1 is 0.1001 in bf16), but for what is
multiplied or divided by, and in means.
Source: `binary_kernel_reduced_floating_vec_opmath_support` in PyTorch's BinaryOpsKernel.cpp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lowering.decompositions.promotion import promoted
from lowering.decompositions.tables import Decomposition, Table, left_whole

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)

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
    aten.elu.default,
    aten.exp2.default,
    aten.floor_divide.default,
    aten.fmod.Tensor,
    aten.hypot.default,
    aten.leaky_relu.default,
    aten.lerp.Scalar,
    aten.lerp.Tensor,
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
    aten.var.correction,
    aten.var_mean.correction,
)

# So are these where the number that they take is no half; sums take the half next to it.
WITH_NUMBERS: tuple[torch._ops.OpOverload, ...] = (
    aten.div.Scalar,
    aten.div.Tensor,
    aten.mul.Scalar,
    aten.mul.Tensor,
)

# Beside weights of floats they are computed in them, and what they return for the backward pass is.
NORMS: tuple[torch._ops.OpOverload, ...] = (
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten.native_group_norm.default,
    aten.native_layer_norm.default,
)

_OF_FLOATS = frozenset({aten.mean.default, aten.mean.dim})
_BY_FLOATS = frozenset({aten.div.Tensor_mode, aten.floor_divide.default, *WITH_NUMBERS})
_TO_HALVES = frozenset({aten.pow.Scalar, aten.pow.Tensor_Scalar})  # numbers of Python, too


def with_halves(table: Table) -> Table:
    """Return decompositions of the ops above, each before what a table has for it.

    Before: %1 = aten.sum(%0, [1])                                    with %0 of bf16
    After:  %1 = convert(%0, f32); %2 = aten.sum(%1, [1]); %3 = convert(%2, bf16)
    """
    return {
        **{op: _widening(op, table.get(op, left_whole)) for op in IN_FLOATS},
        **{op: _widening(op, table.get(op, left_whole), with_number=True) for op in WITH_NUMBERS},
        aten.div.Tensor_mode: _dividing(table.get(aten.div.Tensor_mode, left_whole)),
        **{op: normalizing(op, table[op]) for op in NORMS},
    }


def normalizing(op: Any, otherwise: Decomposition) -> Decomposition:
    """Return a norm of halves that is computed in f32 if its weights or statistics are no halves.

    Args:
        op: the norm; takes what is normalized, and the weights.
        otherwise: computes it where all are of one dtype.
    """

    def decomposed(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        weights = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if x.dtype not in HALVES or all(weight.dtype is x.dtype for weight in weights):
            return otherwise(x, *args, **kwargs)
        result, *others = op(x.float(), *args, **kwargs)
        return result.to(x.dtype), *others

    return decomposed


def _widening(op: Any, otherwise: Decomposition, *, with_number: bool = False) -> Decomposition:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype")
        half = _half(pytree.tree_leaves((args, kwargs)), dtype)
        if half is None or (with_number and not any(_is_finer(arg, half) for arg in args[1:])):
            return otherwise(*args, **kwargs)
        if dtype in HALVES:
            kwargs = {**kwargs, "dtype": None}
        results = op(*_in_floats(op, half, args), **kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype or half), results)

    return decomposed


def _dividing(otherwise: Decomposition) -> Decomposition:
    """Return a decomposition of quotients that are truncated: eager rounds those of tensors before.

    Before: %1 = aten.div.Tensor_mode(%0, %y, "trunc")                with %0 and %y of bf16
    After:  %1 = trunc(convert(%0 / %y, bf16))                          computed in f32
    """
    widening = _widening(aten.div.Tensor_mode, otherwise)

    def decomposed(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
        is_rounded = isinstance(y, torch.Tensor) and y.dim() > 0
        half = torch.result_type(x, y)
        if rounding_mode == "trunc" and is_rounded and half in HALVES:
            x, y = (operand.float() for operand in promoted(x, y))
            return torch.trunc((x / y).to(half).float()).to(half)
        return widening(x, y, rounding_mode=rounding_mode)

    return decomposed


def _half(leaves: list[Any], asked: torch.dtype | None) -> torch.dtype | None:
    """Return the half that an op of floats is computed in: one of no dimensions is a number beside.

    Or the one that is asked for.

    Source: https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    floats = [t for t in tensors if t.is_floating_point()]
    if any(isinstance(leaf, complex) for leaf in leaves) or any(t.is_complex() for t in tensors):
        return None
    if asked in HALVES:
        return asked
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


def _in_floats(op: Any, half: torch.dtype, args: tuple[Any, ...]) -> list[Any]:
    """Return what an op takes as f32, rounded to halves where eager rounds it."""

    def in_floats(place: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return _rounded(value, half) if op in _TO_HALVES else value
        is_kept = op in _OF_FLOATS or (op in _BY_FLOATS and place > 0 and not value.dim())
        return (value if is_kept else value.to(half)).float()

    return [in_floats(place, value) for place, value in enumerate(args)]


def _rounded(number: Any, half: torch.dtype) -> Any:
    """Round a number that is known to the nearest half; one beyond them is infinite."""
    if not isinstance(number, (int, float)) or not 0 < abs(number) < math.inf:
        return number
    info = torch.finfo(half)
    step = max(math.ldexp(info.eps, math.frexp(number)[1] - 1), info.tiny * info.eps)
    nearest = round(number / step) * step
    return type(number)(nearest) if abs(nearest) <= info.max else math.copysign(math.inf, number)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return halves as f32, and any other tensor as it is."""
    return tensor.float() if tensor.dtype in HALVES else tensor

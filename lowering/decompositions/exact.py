"""Decompositions for the cases in which torch-mlir's own lowering loses NaNs or digits.

Its `maximum`, `minimum` and `clamp` drop a NaN on one side, its `argmax` and `argmin` pass NaNs
over; written as comparisons, on which NaN is false, they do what PyTorch does. Its `neg` and its
floor division of integers go through floating point, which is not exact; and some of its
lowerings take unsigned integers for signed ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from lowering.decompositions.promotion import are_floats, promoted

aten = torch.ops.aten
_UNCHANGED: Any = NotImplemented  # PyTorch then keeps the op whole
Number: TypeAlias = int | float


def add(x: torch.Tensor, y: torch.Tensor | Number, *, alpha: Number = 1) -> Any:
    """Decompose `aten.add` of flags, which torch-mlir adds as numbers of one bit, into an `or`."""
    is_flag = y.dtype is torch.bool if isinstance(y, torch.Tensor) else isinstance(y, bool)
    if x.dtype is not torch.bool or not is_flag:
        return _UNCHANGED
    flag = y if isinstance(y, torch.Tensor) else _like(x, y)
    return torch.logical_or(x, flag if alpha else torch.zeros_like(flag))


def maximum(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Decompose `aten.maximum` in floats: `a` where it is larger or NaN, else `b`."""
    if not are_floats(a, b):
        return _UNCHANGED
    a, b = promoted(a, b)
    return torch.where((a > b) | (a != a), a, b)  # asks for NaN


def minimum(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Decompose `aten.minimum` in floats: `a` where it is smaller or NaN, else `b`."""
    if not are_floats(a, b):
        return _UNCHANGED
    a, b = promoted(a, b)
    return torch.where((a < b) | (a != a), a, b)  # asks for NaN


def clamp(x: torch.Tensor, low: Number | None = None, high: Number | None = None) -> Any:
    """Decompose `aten.clamp` on floats: a NaN is neither below `low` nor above `high`."""
    if not x.dtype.is_floating_point:
        return _UNCHANGED
    if low != low or high != high:  # asks for NaN
        return torch.full_like(x, math.nan)
    if low is not None:
        x = torch.where(x < low, _like(x, low), x)
    if high is not None:
        x = torch.where(x > high, _like(x, high), x)
    return x


def clamp_tensor(
    x: torch.Tensor, low: torch.Tensor | None = None, high: torch.Tensor | None = None
) -> Any:
    """Decompose `aten.clamp` by tensors of floats: where a bound is NaN, so is the result."""
    if not torch.is_floating_point(x):
        return _UNCHANGED
    if low is not None:
        x = torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


def hardtanh(x: torch.Tensor, low: Number = -1, high: Number = 1) -> Any:
    """Decompose `aten.hardtanh` (and so `relu6`) into `clamp`, which keeps integers."""
    if _is_inexact(x):
        return torch.clamp(x, low, high)
    return torch.clamp(x, int(low), int(high))


def neg(x: torch.Tensor) -> Any:
    """Decompose `aten.neg` on integers into a multiplication, which wraps as it should."""
    return _UNCHANGED if _is_inexact(x) else torch.mul(x, -1)


def absolute(x: torch.Tensor) -> Any:
    """Decompose `aten.abs` on unsigned integers, which torch-mlir takes for signed ones."""
    return torch.clone(x) if x.dtype is torch.uint8 else _UNCHANGED


def cast(x: torch.Tensor, dtype: torch.dtype) -> Any:
    """Decompose the cast of floats to unsigned integers: eager's is by way of signed ones.

    Of negative numbers, which the direct cast leaves open, so comes their remainder by 256.
    """
    if dtype is not torch.uint8 or not x.dtype.is_floating_point:
        return _UNCHANGED
    return x.to(torch.int64).to(torch.uint8)


def compare(by_tensor: Any, x: torch.Tensor, number: Any) -> Any:
    """Decompose a comparison with a number: eager rounds it to the dtype that it compares in.

    torch-mlir compares in double precision, where no float32 is 0.1.

    Before: %1 = aten.gt.Scalar(%0, 0.1)                                      with %0 of f32
    After:  %1 = aten.gt.Tensor(%0, scalar_tensor(0.1, dtype=f32))
    """
    dtype = torch.result_type(x, number)
    is_rounded = dtype.is_floating_point and dtype is not torch.float64
    if not is_rounded or not isinstance(number, (bool, int, float)):
        return _UNCHANGED
    x = x.to(dtype)
    return by_tensor(x, _like(x, number))


def with_number(op: Any, x: torch.Tensor, bits: int) -> Any:
    """Decompose a bitwise op with a number, which torch-mlir has with a tensor only."""
    return op(x, torch.full((), bits, dtype=torch.result_type(x, bits)))


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Decompose `prims.fma`, which Dynamo makes of `addcdiv_` and its like in optimizers."""
    return a * b + c


def total(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """Decompose `aten.sum` into that over all dimensions."""
    return aten.sum.dim_IntList(x, [], dtype=dtype)


def total_dim(
    x: torch.Tensor,
    dim: list[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Decompose `aten.sum` of unsigned integers, or asked for in eight bits or as a truth."""
    dims = dim or list(range(x.dim()))
    if dtype is torch.bool:
        return torch.sum(x.to(dtype), dims, keepdim) > 0
    if dtype in (torch.uint8, torch.int8):
        wide = x.to(dtype).to(torch.int32)
        return torch.sum(wide, dims, keepdim, dtype=torch.int32).to(dtype)
    if x.dtype is not torch.uint8:
        return _UNCHANGED
    return torch.sum(x.to(dtype or torch.int64), dims, keepdim, dtype=dtype)


def gelu(x: torch.Tensor, *, approximate: str = "none") -> Any:
    """Decompose `aten.gelu` in f64, and the approximate: torch-mlir's constants are too short."""
    if approximate != "tanh":
        is_double = x.dtype is torch.float64
        return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))) if is_double else _UNCHANGED
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + torch.tanh(inner))


def scalar_tensor(number: Number, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Decompose `prims.scalar_tensor`, which PyTorch makes of `xlogy(0.3, x)` and its like."""
    return torch.full((), number, dtype=dtype, device=device)


def roll(x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.Tensor:
    """Decompose `aten.roll`: torch-mlir takes no shift for more than there is along a dimension.

    Before: %1 = aten.roll(%0, [7], [1])                       with %0 of [4, 5]
    After:  %1 = cat([slice(%0, 1, 3, 5), slice(%0, 1, 0, 3)], 1)
    """
    if not dims:
        return roll(x.reshape(-1), shifts, [0]).view(x.shape)
    result = torch.clone(x)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim] if x.dim() else 1
        if isinstance(size, int) and size < 2:
            continue
        kept = size - shift % size
        last, first = (
            aten.slice.Tensor(result, dim, start, end) for start, end in ((kept, size), (0, kept))
        )
        result = torch.cat([last, first], dim)
    return result


def compare_tensors(op: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Decompose a comparison of two dtypes into one of the dtype that eager compares in.

    And `x == x`, which torch-mlir folds to true: it is how one asks for NaN.
    """
    if x is y and op is torch.eq:
        return torch.logical_not(x != y)
    return _UNCHANGED if x.dtype is y.dtype else op(*promoted(x, y))


def argmax(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Decompose `aten.argmax` on floats: where the largest value, or else a NaN, is first."""
    return _first(torch.amax, x, dim, keepdim)


def argmin(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Decompose `aten.argmin` on floats: where the smallest value, or else a NaN, is first."""
    return _first(torch.amin, x, dim, keepdim)


def max_dim(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """Decompose `aten.max.dim` on floats into its values and `argmax`."""
    if not x.dtype.is_floating_point:
        return _UNCHANGED
    return torch.amax(x, dim, keepdim), torch.argmax(x, dim, keepdim)


def min_dim(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """Decompose `aten.min.dim` on floats into its values and `argmin`."""
    if not x.dtype.is_floating_point:
        return _UNCHANGED
    return torch.amin(x, dim, keepdim), torch.argmin(x, dim, keepdim)


def var(
    x: torch.Tensor,
    dim: list[int] | None = None,
    *,
    correction: Number | None = None,
    keepdim: bool = False,
) -> Any:
    """Decompose `aten.var` of fewer elements than the correction: it divides by zero, not less.

    So where there may be as few: of a number that is not known, and a correction above 1.
    """
    if x.dtype.is_complex:
        return _UNCHANGED
    dims = list(dim or range(x.dim()))
    count = math.prod(x.shape[d] for d in dims) if x.dim() else 1
    least = 1 if correction is None else correction
    if not isinstance(count, int):
        if least <= 1:
            return _UNCHANGED
        squares = torch.sum(torch.square(x - torch.mean(x, dims, True)), dims, keepdim)
        return squares / torch.sym_max(count - least, 0)
    if count >= least:
        return _UNCHANGED
    squares = torch.square(x - torch.sum(x, dims, True) / count) if count else x
    return torch.sum(squares, dims, keepdim) / torch.zeros((), dtype=x.dtype, device=x.device)


def var_mean(
    x: torch.Tensor, dim: list[int] | None = None, *, keepdim: bool = False, **correction: Any
) -> Any:
    """Decompose `aten.var_mean` where `var` is."""
    spread = var(x, dim, keepdim=keepdim, **correction)
    if spread is _UNCHANGED:
        return _UNCHANGED
    return spread, torch.mean(x, list(dim or range(x.dim())), keepdim)


def scatter_mean(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    """Decompose the mean of `aten.scatter_reduce` on integers: it is rounded down."""
    if reduce != "mean" or _is_inexact(x):
        return _UNCHANGED
    total = torch.scatter_reduce(x, dim, index, source, "sum", include_self=include_self)
    start = torch.ones_like(x) if include_self else torch.zeros_like(x)
    count = torch.scatter_add(start, dim, index, torch.ones_like(source))
    return torch.div(total, torch.clamp(count, 1), rounding_mode="floor")


def logspace(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Keep `aten.logspace` of integers whole: a power that is a little too small loses one."""
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        return _UNCHANGED
    return torch._refs.logspace(*args, dtype=dtype, **kwargs)


_COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")

DECOMPOSITIONS = {
    **{
        getattr(aten, name).Scalar: functools.partial(compare, getattr(torch, name))
        for name in _COMPARISONS
    },
    **{
        getattr(aten, name).Tensor: functools.partial(compare_tensors, getattr(torch, name))
        for name in _COMPARISONS
    },
    aten.abs.default: absolute,
    aten.add.Scalar: add,
    aten.add.Tensor: add,
    aten.argmax.default: argmax,
    aten.argmin.default: argmin,
    aten.bitwise_or.Scalar: functools.partial(with_number, torch.bitwise_or),
    aten.bitwise_xor.Scalar: functools.partial(with_number, torch.bitwise_xor),
    aten.clamp.Tensor: clamp_tensor,
    aten.clamp.default: clamp,
    aten.gelu.default: gelu,
    aten.hardtanh.default: hardtanh,
    aten.logspace.Scalar_Tensor: logspace,
    aten.logspace.Tensor_Scalar: logspace,
    aten.logspace.Tensor_Tensor: logspace,
    aten.logspace.default: logspace,
    aten.max.dim: max_dim,
    aten.maximum.default: maximum,
    aten.min.dim: min_dim,
    aten.minimum.default: minimum,
    aten.neg.default: neg,
    aten.roll.default: roll,
    aten.scatter_reduce.two: scatter_mean,
    aten.sum.default: total,
    aten.sum.dim_IntList: total_dim,
    aten.var.correction: var,
    aten.var_mean.correction: var_mean,
    torch.ops.prims.convert_element_type.default: cast,
    torch.ops.prims.scalar_tensor.default: scalar_tensor,
}


def _first(extreme: Any, x: torch.Tensor, dim: int | None, keepdim: bool) -> Any:
    if not x.dtype.is_floating_point or x.dim() == 0:
        return _UNCHANGED
    value = extreme(x, [] if dim is None else [dim], True)  # NaN if there is a NaN
    is_it = (x == value) | (x != x)  # asks for NaN
    return aten.argmax.default(is_it.to(torch.int32), dim, keepdim)


def _is_inexact(value: torch.Tensor | Number) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    return isinstance(value, float)


def _like(x: torch.Tensor, value: Number) -> torch.Tensor:
    return torch.full((), value, dtype=x.dtype, device=x.device)


def of_dynamo() -> dict[torch._ops.OpOverload, Any]:
    """Decompose the ops that are there only once Dynamo is, which graphs have from it alone."""
    op = getattr(torch.ops.prims, "fma", None)
    return {} if op is None else {op.default: fma}

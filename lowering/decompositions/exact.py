"""Decompositions for the cases in which torch-mlir's own lowering loses digits, or has none.

Its `neg` of integers goes through floating point, which is not exact; some of its lowerings take
unsigned integers for signed ones, and some of its constants are too short.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lowering.decompositions.promotion import promoted

aten = torch.ops.aten
Number: TypeAlias = int | float


def add(x: torch.Tensor, y: torch.Tensor | Number, *, alpha: Number = 1) -> Any:
    """Decompose `aten.add` of flags, which torch-mlir adds as numbers of one bit, into an `or`."""
    is_flag = y.dtype is torch.bool if isinstance(y, torch.Tensor) else isinstance(y, bool)
    if x.dtype is not torch.bool or not is_flag:
        return NotImplemented
    _, flag = promoted(x, y)
    return torch.logical_or(x, flag if alpha else torch.zeros_like(flag))


def efficient_zeros(size: Sequence[int], **how: Any) -> torch.Tensor:
    """Decompose `aten._efficientzerotensor`, which has no memory, into zeros that have.

    Derivatives of derivatives are full of it: what is constant changes by nothing.
    """
    return torch.zeros(size, **how)


def neg(x: torch.Tensor) -> Any:
    """Decompose `aten.neg` on integers into a multiplication, which wraps as it should."""
    is_inexact = x.dtype.is_floating_point or x.dtype.is_complex
    return NotImplemented if is_inexact else torch.mul(x, -1)


def absolute(x: torch.Tensor) -> Any:
    """Decompose `aten.abs` on unsigned integers, which torch-mlir takes for signed ones."""
    return torch.clone(x) if x.dtype is torch.uint8 else NotImplemented


def cast(x: torch.Tensor, dtype: torch.dtype) -> Any:
    """Decompose the cast of floats to unsigned integers: eager's is by way of signed ones.

    Of negative numbers, which the direct cast leaves open, so comes their remainder by 256.
    """
    if dtype is not torch.uint8 or not x.dtype.is_floating_point:
        return NotImplemented
    return x.to(torch.int64).to(torch.uint8)


def with_number(op: Any, x: torch.Tensor, bits: int) -> Any:
    """Decompose a bitwise op with a number, which torch-mlir has with a tensor only."""
    return op(*promoted(x, bits))


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
        return NotImplemented
    return torch.sum(x.to(dtype or torch.int64), dims, keepdim, dtype=dtype)


def gelu(x: torch.Tensor, *, approximate: str = "none") -> Any:
    """Decompose `aten.gelu` in f64, and the approximate: torch-mlir's constants are too short."""
    if approximate != "tanh":
        is_double = x.dtype is torch.float64
        return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))) if is_double else NotImplemented
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


def var(
    x: torch.Tensor,
    dim: list[int] | None = None,
    *,
    correction: Number | None = None,
    keepdim: bool = False,
) -> Any:
    """Decompose `aten.var` of fewer elements than the correction: it divides by zero, not less.

    So where there may be as few: their number is not known.
    """
    if x.dtype.is_complex:
        return NotImplemented
    dims = list(dim or range(x.dim()))
    count = math.prod(x.shape[d] for d in dims) if x.dim() else 1
    least = 1 if correction is None else correction
    if not isinstance(count, int):
        if statically_known_true(count >= least):
            return NotImplemented
        squares = torch.sum(torch.square(x - torch.mean(x, dims, True)), dims, keepdim)
        return squares / torch.sym_max(count - least, 0)
    if count >= least:
        return NotImplemented
    squares = torch.square(x - torch.sum(x, dims, True) / count) if count else x
    return torch.sum(squares, dims, keepdim) / torch.zeros((), dtype=x.dtype, device=x.device)


def var_mean(
    x: torch.Tensor, dim: list[int] | None = None, *, keepdim: bool = False, **correction: Any
) -> Any:
    """Decompose `aten.var_mean` where `var` is."""
    spread = var(x, dim, keepdim=keepdim, **correction)
    if spread is NotImplemented:
        return NotImplemented
    return spread, torch.mean(x, list(dim or range(x.dim())), keepdim)


def logspace(
    start: Any,
    end: Any,
    steps: int,
    base: float = 10.0,
    *,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Any:
    """Keep `aten.logspace` of integers whole: a power that is a little too small loses one.

    And that of a negative base, which PyTorch's decomposition does not take.
    """
    if base < 0 or (dtype is not None and not (dtype.is_floating_point or dtype.is_complex)):
        return NotImplemented
    return torch._refs.logspace(start, end, steps, base, dtype=dtype, **kwargs)


DECOMPOSITIONS = {
    aten.abs.default: absolute,
    aten.add.Scalar: add,
    aten._efficientzerotensor.default: efficient_zeros,
    aten.add.Tensor: add,
    aten.bitwise_or.Scalar: functools.partial(with_number, torch.bitwise_or),
    aten.bitwise_xor.Scalar: functools.partial(with_number, torch.bitwise_xor),
    aten.gelu.default: gelu,
    aten.logspace.Scalar_Tensor: logspace,
    aten.logspace.Tensor_Scalar: logspace,
    aten.logspace.Tensor_Tensor: logspace,
    aten.logspace.default: logspace,
    aten.neg.default: neg,
    aten.roll.default: roll,
    aten.sum.default: total,
    aten.sum.dim_IntList: total_dim,
    aten.var.correction: var,
    aten.var_mean.correction: var_mean,
    torch.ops.prims.convert_element_type.default: cast,
    torch.ops.prims.scalar_tensor.default: scalar_tensor,
}


def of_dynamo() -> dict[torch._ops.OpOverload, Any]:
    """Decompose the ops that are there only once Dynamo is, which graphs have from it alone."""
    op = getattr(torch.ops.prims, "fma", None)
    return {} if op is None else {op.default: fma}

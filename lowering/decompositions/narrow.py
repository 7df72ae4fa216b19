"""Ops on integers of eight bits, computed in 32 bits and cut: what PyTorch's kernels give.

torch-mlir takes bytes (uint8) for signed ones, and crashes on products of signed ones. Images and
masks are such tensors, and quantized weights: of four bits, there are two in a byte.

A number beside bytes is one, too: eager compares with the lowest eight bits of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from lowering.decompositions.promotion import common_dtype
from lowering.decompositions.tables import Decomposition, Table, left_whole

aten = torch.ops.aten
_WIDE = torch.int32
_BITS = 8
Dtypes: TypeAlias = tuple[torch.dtype, ...]

_UNSIGNED: Dtypes = (torch.uint8,)
_BOTH: Dtypes = (torch.uint8, torch.int8)

# All that they are given is promoted to one dtype, numbers included, as the result is.
ELEMENTWISE: tuple[torch._ops.OpOverload, ...] = (
    aten.add.Scalar,
    aten.add.Tensor,
    aten.bitwise_and.Scalar,
    aten.bitwise_and.Tensor,
    aten.bitwise_or.Scalar,
    aten.bitwise_or.Tensor,
    aten.bitwise_xor.Scalar,
    aten.bitwise_xor.Tensor,
    aten.clamp.Tensor,
    aten.clamp.default,
    aten.div.Scalar_mode,
    aten.div.Tensor_mode,
    aten.eq.Scalar,
    aten.eq.Tensor,
    aten.floor_divide.default,
    aten.fmod.Scalar,
    aten.fmod.Tensor,
    aten.ge.Scalar,
    aten.ge.Tensor,
    aten.gt.Scalar,
    aten.gt.Tensor,
    aten.le.Scalar,
    aten.le.Tensor,
    aten.lt.Scalar,
    aten.lt.Tensor,
    aten.maximum.default,
    aten.minimum.default,
    aten.mul.Scalar,
    aten.mul.Tensor,
    aten.ne.Scalar,
    aten.ne.Tensor,
    aten.pow.Tensor_Scalar,
    aten.remainder.Scalar,
    aten.remainder.Scalar_Tensor,
    aten.remainder.Tensor,
    aten.sub.Scalar,
    aten.sub.Tensor,
)

# What has a number of more bits is left to eager, whose error it is.
_REFUSING = frozenset({aten.clamp.default, aten.pow.Tensor_Scalar})

# Their results are of eight bits where their first argument is, but for indices, and products of
# all numbers. Signed bytes are widened where torch-mlir fails on them; others run as they are.
OF_ONE_DTYPE: dict[torch._ops.OpOverload, Dtypes] = {
    aten.gather.default: _UNSIGNED,
    aten.max.default: _BOTH,
    aten.min.default: _BOTH,
    aten.prod.default: _UNSIGNED,
    aten.prod.dim_int: _UNSIGNED,
    aten.scatter_add.default: _UNSIGNED,
    aten.sort.default: _UNSIGNED,
    aten.sort.stable: _UNSIGNED,
    aten.topk.default: _UNSIGNED,
}

# Of bytes, they are bytes, and not flags.
TRUTHS: tuple[torch._ops.OpOverload, ...] = (
    aten.all.default,
    aten.all.dim,
    aten.any.default,
    aten.any.dim,
)


def with_narrow(table: Table) -> Table:
    """Return decompositions of the ops above, each before what a table has for it.

    Before: %1 = aten.add.Tensor(%0, 300)                              with %0 of u8
    After:  %1 = convert(%0, i32); %2 = aten.add.Tensor(%1, 44); %3 = convert(%2, u8)
    """
    return {
        **{op: _on_bytes(_elementwise(op), _BOTH, table.get(op, left_whole)) for op in ELEMENTWISE},
        **{
            op: _on_bytes(_of_one_dtype(op), d, table.get(op, left_whole))
            for op, d in OF_ONE_DTYPE.items()
        },
        **{op: _on_bytes(_of_truths(op), _UNSIGNED, table.get(op, left_whole)) for op in TRUTHS},
        aten._int_mm.default: int_mm,
        aten.cat.default: _cat,
        aten.constant_pad_nd.default: _padded(table.get(aten.constant_pad_nd.default, left_whole)),
        aten.full_like.default: _full_like,
        aten.mm.default: mm,
        aten.scalar_tensor.default: _scalar_tensor,
        aten.scatter_reduce.two: _scattered(table.get(aten.scatter_reduce.two, left_whole)),
        aten.view.dtype: view_dtype,
        aten.where.self: _where,
    }


def mm(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Decompose `aten.mm` of signed bytes: their product is cut to eight bits."""
    return torch._int_mm(a, b).to(a.dtype) if a.dtype is torch.int8 else NotImplemented


def int_mm(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Decompose `aten._int_mm` of bytes, as CPUs want them, and signed ones, into one of signed.

    Before: %1 = aten._int_mm(%0, %w)                                  with %0 of u8, %w of i8
    After:  %1 = aten._int_mm(convert(%0 - 128, i8), %w) + 128 * sum(%w, 0)
    """
    if a.dtype is not torch.uint8:
        return NotImplemented
    middle = 2 ** (_BITS - 1)
    signed = (a.to(_WIDE) - middle).to(torch.int8)
    return torch._int_mm(signed, b) + middle * torch.sum(b, 0, dtype=_WIDE)


def view_dtype(x: torch.Tensor, dtype: torch.dtype) -> Any:
    """Decompose `aten.view` of signed bytes as others, and back: their bits stay as they are."""
    return x.to(dtype) if x.dtype in _BOTH and dtype in _BOTH else NotImplemented


def _on_bytes(
    decomposition: Decomposition, dtypes: Dtypes, otherwise: Decomposition
) -> Decomposition:
    """Return a decomposition of what has operands of some dtypes, and another of all else."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        if _has(args, dtypes):
            return decomposition(*args, **kwargs)
        return otherwise(*args, **kwargs)

    return decomposed


def _elementwise(op: Any) -> Decomposition:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        if op in _REFUSING and any(_is_refused(number, args[0].dtype) for number in args[1:]):
            return NotImplemented
        operands, dtype = _promoted(args)
        return _cut(op(*operands, **kwargs), dtype)

    return decomposed


def _of_one_dtype(op: Any) -> Decomposition:
    def decomposed(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        operands = pytree.tree_map_only(torch.Tensor, _widened, (x, *args))
        if kwargs.get("dtype") is not None:  # of a product of all numbers
            return NotImplemented if kwargs["dtype"] in _BOTH else op(*operands, **kwargs)
        return _cut(op(*operands, **kwargs), x.dtype)

    return decomposed


def _of_truths(op: Any) -> Decomposition:
    def decomposed(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(x.to(torch.bool), *args, **kwargs).to(torch.uint8)

    return decomposed


def _scattered(otherwise: Decomposition) -> Decomposition:
    """Return a decomposition of the largest and the smallest of bytes; sums are cut on the way."""
    op = aten.scatter_reduce.two

    def decomposed(x: torch.Tensor, dim: int, *args: Any, **kwargs: Any) -> Any:
        if x.dtype is torch.uint8 and args[-1] in ("amax", "amin"):
            operands = pytree.tree_map_only(torch.Tensor, _widened, args)
            return op(_widened(x), dim, *operands, **kwargs).to(x.dtype)
        return otherwise(x, dim, *args, **kwargs)

    return decomposed


def _padded(otherwise: Decomposition) -> Decomposition:
    """Return a decomposition of bytes padded by a number that torch-mlir may take for no byte."""
    op = aten.constant_pad_nd.default

    def decomposed(x: torch.Tensor, amounts: list[int], value: Any = 0) -> Any:
        if x.dtype is torch.uint8 and value:
            return op(_widened(x), amounts, value).to(x.dtype)
        return otherwise(x, amounts, value)

    return decomposed


def _cat(tensors: list[torch.Tensor], dim: int = 0) -> Any:
    if not _is_widened(tensors):
        return NotImplemented
    operands, dtype = _promoted(tensors)
    return _cut(torch.cat(operands, dim), dtype)


def _full_like(x: torch.Tensor, value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if torch.uint8 not in (x.dtype, dtype):
        return NotImplemented
    if (dtype or x.dtype) is not torch.uint8:
        return torch.full_like(_widened(x), value, dtype=dtype)
    if _is_refused(value, torch.uint8):
        return NotImplemented
    return torch.full_like(_widened(x), _integer(value), dtype=_WIDE).to(torch.uint8)


def _scalar_tensor(value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if dtype is not torch.uint8 or _is_refused(value, dtype):
        return NotImplemented
    return torch.full((), _integer(value), dtype=_WIDE).to(dtype)


def _where(condition: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
    if condition.dtype is not torch.bool or not _is_widened((x, y)):
        return NotImplemented
    operands, dtype = _promoted((x, y))
    return _cut(torch.where(condition, *operands), dtype)


def _is_widened(tensors: Iterable[torch.Tensor]) -> bool:
    """Say whether there are bytes, and not signed ones alone, which stay as they are."""
    dtypes = {tensor.dtype for tensor in tensors}
    return not dtypes.isdisjoint(_BOTH) and dtypes != {torch.int8}


def _has(operands: Any, dtypes: Dtypes) -> bool:
    return any(isinstance(value, torch.Tensor) and value.dtype in dtypes for value in operands)


def _promoted(operands: Any) -> tuple[list[Any], torch.dtype]:
    """Give operands in the dtype that eager computes in, narrow ones in a wider, and that dtype."""
    dtype = common_dtype(*operands)

    def promoted(operand: Any) -> Any:
        if isinstance(operand, torch.Tensor):
            return _widened(operand.to(dtype))
        return operand if operand is None or dtype not in _BOTH else lowest_bits(operand, dtype)

    return [promoted(operand) for operand in operands], dtype


def _integer(value: Any) -> Any:
    return value if isinstance(value, torch.SymInt) else int(value)


def lowest_bits(number: Any, dtype: torch.dtype) -> Any:
    """Return what is left of a number in an integer's bits."""
    info = torch.iinfo(dtype)
    return (number - info.min) % 2**info.bits + info.min


def _cut(results: Any, dtype: torch.dtype) -> Any:
    """Give what was computed in a wider dtype in its own."""
    if dtype not in _BOTH:
        return results

    def cut(result: torch.Tensor) -> torch.Tensor:
        return result.to(dtype) if result.dtype is _WIDE else result

    return pytree.tree_map_only(torch.Tensor, cut, results)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_WIDE) if tensor.dtype in _BOTH else tensor


def _is_refused(number: Any, dtype: torch.dtype) -> bool:
    """Say whether eager raises an error for a number, since it has more than eight bits."""
    least = -(2**_BITS) + 1 if dtype is torch.uint8 else torch.iinfo(dtype).min
    return isinstance(number, int) and not least <= number <= torch.iinfo(dtype).max

"""Ops in other words: numbers that change from call to call travel as tensors, not as constants.

A kernel holds its constants, so `x + 0.1` and `x + 0.2` would be two kernels, and a learning rate
that falls would compile at each step. A form says which arguments are such numbers, and computes
the op with tensors of no dimension in their place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from lowering.decompositions.halves import NORMS, normalizing, widened

aten = torch.ops.aten
Tensor = torch.Tensor
# Says which values of an argument travel: numbers, and not those that have a fast form of their
# own, or another meaning.
Travels = Callable[[Any], bool]
# What an argument is like: a tensor of a dtype and a shape, or a number.
Kind = tuple[torch.dtype, tuple[int, ...]] | type
# An op of PyTorch's that refuses a number, and what its other arguments are like.
Probe = tuple[Callable[..., Any], tuple[Kind, ...]]


def travels(value: Any) -> bool:
    """Say whether a number can be a tensor of no dimension."""
    kind = type(value)
    return kind is float or (kind is int and -(1 << 63) <= value < 1 << 63)


def may_be_tensor(value: Any) -> bool:
    """Say whether a number in the place of a tensor can be one: truths can, and what travels."""
    return type(value) is bool or travels(value)


@dataclass(frozen=True)
class Form:
    """How an op is traced.

    Attributes:
        function: takes the op's arguments, the numbers as tensors of no dimension.
        numbers: names of the arguments that are such numbers, beside those that the op's schema
            calls tensors.
        travels: which of those numbers are tensors; the others are compiled in.
        keeps_digits: it stores a number into integers, and computes nothing with it.
        fits: PyTorch refuses numbers that are too large for the dtype of the result.
        scales: PyTorch's op that multiplies by a number, and refuses those that are too large for
            the dtype in which it computes; and how many arguments come before the number.
    """

    function: Callable[..., Any]
    numbers: frozenset[str] = frozenset()
    travels: Travels = travels
    keeps_digits: bool = False
    fits: bool = False
    scales: tuple[Callable[..., Any], int] | None = None

    def probe(self, leaves: Sequence[Any], result: Any, index: int) -> Probe | None:
        """Return what refuses a leaf of a call, which is a number, as PyTorch does; or None."""
        if self.fits:  # of one element alone, PyTorch lets them overflow
            return Tensor.fill_, ((result.dtype, (min(2, math.prod(result.shape)),)),)
        if self.scales is None or index < self.scales[1]:
            return None
        return self.scales[0], tuple(map(_kind, leaves[:index]))


def _kind(leaf: Any) -> Kind:
    if not isinstance(leaf, Tensor):
        return type(leaf)
    return leaf.dtype, (1,) if leaf.dim() else ()  # what has no dimension does not widen others


def _form(function: Callable[..., Any], *numbers: str, **attributes: Any) -> Form:
    return Form(function, frozenset(numbers), **attributes)


def _scaling(
    function: Callable[..., Any], number: str, op: Callable[..., Any], count: int = 2
) -> Form:
    def scales(*args: Any, value: float) -> Any:
        return op(*args, **{number: value})

    return Form(function, frozenset({number}), scales=(scales, count))


def _add(x: Tensor, other: Tensor, *, alpha: Any = None) -> Any:
    return torch.add(x, _times(alpha, other, x))


def _sub(x: Tensor, other: Tensor, *, alpha: Any = None) -> Any:
    return torch.sub(x, _times(alpha, other, x))


def _rsub(x: Tensor, other: Tensor, *, alpha: Any = None) -> Any:
    return _sub(other, x, alpha=alpha)


def _times(alpha: Any, other: Tensor, x: Tensor) -> Any:
    """Return a multiple of what is added to `x`: a number that makes it another dtype, is not ours.

    PyTorch refuses such numbers, or computes with them in the dtype of the sum.
    """
    if alpha is None:
        return other
    scaled = other * alpha
    if torch.result_type(x, scaled) is not torch.result_type(x, other):
        raise TypeError("a multiple of another dtype")
    return scaled


def _addcmul(x: Tensor, one: Tensor, other: Tensor, *, value: Any = None) -> Any:
    return x + _factor(x, one, other, value) * other


def _addcdiv(x: Tensor, one: Tensor, other: Tensor, *, value: Any = None) -> Any:
    if not any(t.dtype.is_floating_point or t.dtype.is_complex for t in (one, other)):
        raise TypeError("a quotient of integers, which PyTorch refuses")
    return x + _factor(x, one, other, value) / other


def _factor(x: Tensor, one: Tensor, other: Tensor, value: Any) -> Tensor:
    """Return a multiple of `one`, in the dtype of all three: PyTorch computes in that."""
    kind = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
    _, dtype = elementwise_dtypes(x, one, other, type_promotion_kind=kind)
    if dtype is torch.bool:
        raise TypeError("a product of truths, which PyTorch refuses")
    if value is None:
        return one.to(dtype)
    if value.dtype.is_floating_point and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError("a number that PyTorch cuts to an integer")
    multiple: Tensor = value * one.to(dtype)
    return multiple


def _fill(x: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor):  # True, or a complex number
        return torch.full(x.shape, value, dtype=x.dtype, device=x.device)
    return value.to(x.dtype).expand(x.shape).clone()


def _pad(x: Tensor, amounts: Sequence[int], value: Any = 0) -> Any:
    if not isinstance(value, Tensor):
        return aten.constant_pad_nd.default(x, amounts, value)
    is_inside = aten.constant_pad_nd.default(torch.ones_like(x, dtype=torch.bool), amounts, 0)
    return torch.where(is_inside, aten.constant_pad_nd.default(x, amounts), value.to(x.dtype))


def _scatter(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return aten.scatter.value(x, dim, index, value)
    is_hit = aten.scatter.value(torch.zeros_like(x, dtype=torch.bool), dim, index, True)
    return torch.where(is_hit, value.to(x.dtype), x)


def _index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return aten.index_fill.int_Scalar(x, dim, index, value)
    return aten.index_fill.int_Tensor(x, dim, index, value.to(x.dtype))


def _triangle(is_above: bool) -> Callable[..., Any]:
    def kept(x: Tensor, diagonal: Any = 0) -> Any:
        rows, columns = (torch.arange(size, device=x.device) for size in x.shape[-2:])
        distance = columns - rows.unsqueeze(-1)
        is_kept = distance >= diagonal if is_above else distance <= diagonal
        return torch.where(is_kept, x, x.new_zeros(())).contiguous()

    return kept


def _power(x: Tensor, exponent: Any) -> Any:
    if isinstance(exponent, Tensor) and not x.dtype.is_floating_point:
        raise TypeError("a root of integers, which the host alone knows to the last digit")
    return torch.pow(x, exponent)


def _leaky_relu(x: Tensor, negative_slope: Any = 0.01) -> Any:
    return _sloped(x, x, negative_slope)


def _sloped(gradient: Tensor, x: Tensor, negative_slope: Any, self_is_result: bool = False) -> Any:
    if not x.dtype.is_floating_point:
        raise TypeError("a slope of integers, which PyTorch refuses")
    if self_is_result and not isinstance(negative_slope, Tensor) and not negative_slope >= 0:
        raise TypeError("the sign of what is overwritten by its negative, which PyTorch refuses")
    wide = widened(gradient)
    return torch.where(x > 0, wide, wide * negative_slope).to(gradient.dtype)


def _is_root(exponent: Any) -> bool:
    """Say whether a power to a number is neither a product nor a square root."""
    return type(exponent) is float and exponent % 1 != 0 and abs(exponent) != 0.5


def _unless(*numbers: float) -> Travels:
    return lambda value: travels(value) and value not in numbers


def _is_zero(weight: Any) -> bool:
    return not isinstance(weight, Tensor) and weight == 0


def _weighed(op: Callable[..., Any], product: Callable[..., Any]) -> Form:
    """Return the form of a sum with a product, of which BLAS computes no multiple by 0."""

    def weighed(x: Tensor, one: Tensor, other: Tensor, **weights: Any) -> Any:
        alpha, beta = weights.get("alpha"), weights.get("beta")
        if not any(isinstance(w, Tensor) or w == 0 for w in (alpha, beta)):
            return op(x, one, other, **weights)
        if not x.dtype == one.dtype == other.dtype:
            raise TypeError("a product of several dtypes, which PyTorch refuses")
        wide, result = widened(x), product(widened(one), widened(other))
        result = torch.zeros_like(result) if _is_zero(alpha) else _times(alpha, result, wide)
        added = _times(None if _is_zero(beta) else beta, wide, wide).expand(result.shape)
        return (result if _is_zero(beta) else result + added).to(x.dtype)

    def refuses(x: Tensor, *_: Any, value: float) -> Any:
        return torch.add(widened(x), widened(x), alpha=value)

    names = frozenset({"beta", "alpha"})
    return Form(weighed, names, _unless(0, 1), scales=(refuses, 3))


_LEGIT = aten._native_batch_norm_legit_functional.default
_PYTORCHS_LEGIT = get_decompositions([_LEGIT])[_LEGIT]


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    training: bool,
    momentum: Any,
    eps: float,
) -> Any:
    def norm(x: Tensor, *weights: Tensor | None) -> Any:
        return _PYTORCHS_LEGIT(x, *weights, training, momentum, eps)

    return normalizing(norm, norm)(x, weight, bias, mean, var)


FORMS: dict[Any, Form] = {
    aten.add.Tensor: _scaling(_add, "alpha", torch.add),
    aten.sub.Tensor: _scaling(_sub, "alpha", torch.sub),
    aten.rsub.Tensor: _scaling(_rsub, "alpha", torch.rsub),
    aten.addcmul.default: _scaling(_addcmul, "value", torch.addcmul, 3),
    aten.addcdiv.default: _scaling(_addcdiv, "value", torch.addcdiv, 3),
    aten.lerp.Scalar: _scaling(torch.lerp, "weight", torch.lerp),
    aten.clamp.default: _form(torch.clamp, "min", "max", fits=True),
    aten.clamp_min.default: _form(torch.clamp_min, "min", fits=True),
    aten.clamp_max.default: _form(torch.clamp_max, "max", fits=True),
    aten.eq.Scalar: _form(torch.eq, "other"),
    aten.ne.Scalar: _form(torch.ne, "other"),
    aten.lt.Scalar: _form(torch.lt, "other"),
    aten.le.Scalar: _form(torch.le, "other"),
    aten.gt.Scalar: _form(torch.gt, "other"),
    aten.ge.Scalar: _form(torch.ge, "other"),
    aten.fill.Scalar: _form(_fill, "value", keeps_digits=True, fits=True),
    aten.masked_fill.Scalar: _form(torch.masked_fill, "value", fits=True),
    aten.index_fill.int_Scalar: _form(_index_fill, "value", keeps_digits=True, fits=True),
    aten.scatter.value: _form(_scatter, "value", keeps_digits=True, fits=True),
    aten.constant_pad_nd.default: _form(
        _pad, "value", travels=_unless(0), keeps_digits=True, fits=True
    ),
    aten.triu.default: _form(_triangle(is_above=True), "diagonal"),
    aten.tril.default: _form(_triangle(is_above=False), "diagonal"),
    aten.pow.Tensor_Scalar: _form(_power, "exponent", travels=_is_root),
    aten.leaky_relu.default: _form(_leaky_relu, "negative_slope"),
    aten.leaky_relu_backward.default: _form(
        _sloped, "negative_slope", travels=lambda slope: travels(slope) and slope >= 0
    ),
    aten.addmm.default: _weighed(aten.addmm, torch.mm),
    aten.addmv.default: _weighed(aten.addmv, torch.mv),
    aten.baddbmm.default: _weighed(aten.baddbmm, torch.bmm),
    _LEGIT: _form(_batch_norm, "momentum"),
    **{op: _form(normalizing(op, op)) for op in NORMS if op is not _LEGIT},
}

# Kernels of these serve one set of sizes each: torch-mlir or IREE wants to know them.
STATIC = re.compile(
    r"aten\.(_?adaptive_|avg_pool|max_pool|convolution|_convolution|grid_sampler|upsample|_upsample"
    r"|repeat\.|reflection_pad|replication_pad)"
)

# PyTorch would make several calls of these; as one, they are one kernel.
WHOLE = (
    "constant_pad_nd",
    "convolution",
    "convolution_backward",
    "diagonal_backward",
    "embedding",
    "index_put",
    "ldexp.Tensor",
    "ldexp.out",
    "ldexp_",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "logsumexp",
    "masked_fill.Scalar",
    "mean",
    "native_group_norm",
    "native_layer_norm",
    "repeat",
    "slice_backward",
    "stack",
)

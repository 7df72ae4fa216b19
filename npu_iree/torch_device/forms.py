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

from lowering.decompositions.halves import NORMS, normalizing

aten = torch.ops.aten
Tensor = torch.Tensor
# What an argument is like: a tensor of a dtype and a shape, or a number.
Kind = tuple[torch.dtype, tuple[int, ...]] | type
# An op of PyTorch's that refuses a number, and what its other arguments are like.
Probe = tuple[Callable[..., Any], tuple[Kind, ...]]


@dataclass(frozen=True)
class Form:
    """How an op is traced.

    Attributes:
        function: takes the op's arguments, the numbers as tensors of no dimension.
        numbers: names of the arguments that are such numbers, beside those that the op's schema
            calls tensors.
        keeps_digits: it stores a number into integers, and computes nothing with it.
        fits: PyTorch refuses numbers that are too large for the dtype of the result.
        scales: PyTorch's op that multiplies by a number, and refuses those that are too large for
            the dtype in which it computes; and how many arguments come before the number.
    """

    function: Callable[..., Any]
    numbers: frozenset[str] = frozenset()
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


def _form(
    function: Callable[..., Any], *numbers: str, keeps_digits: bool = False, fits: bool = False
) -> Form:
    return Form(function, frozenset(numbers), keeps_digits, fits)


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

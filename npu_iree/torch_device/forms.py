"""Ops in other words: numbers that change from call to call travel as tensors, not as constants.

A kernel holds its constants, so `x + 0.1` and `x + 0.2` would be two kernels, and a learning rate
that falls would compile at each step. A form says which arguments are such numbers, and computes
the op with tensors of no dimension in their place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


@dataclass(frozen=True)
class Form:
    """How an op is traced.

    Attributes:
        function: takes the op's arguments, the numbers as tensors of no dimension.
        numbers: names of the arguments that are such numbers, beside those that the op's schema
            calls tensors.
        keeps_digits: it stores a number into integers, and computes nothing with it.
        fits: PyTorch refuses numbers that are too large for the dtype of the result.
    """

    function: Callable[..., Any]
    numbers: frozenset[str] = frozenset()
    keeps_digits: bool = False
    fits: bool = False


def _form(
    function: Callable[..., Any], *numbers: str, keeps_digits: bool = False, fits: bool = False
) -> Form:
    return Form(function, frozenset(numbers), keeps_digits, fits)


def _add(x: Tensor, other: Tensor, *, alpha: Any = None) -> Any:
    return torch.add(x, _times(alpha, other, x))


def _sub(x: Tensor, other: Tensor, *, alpha: Any = None) -> Any:
    return torch.sub(x, _times(alpha, other, x))


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
    return x + (one * other if value is None else value * one * other)


def _addcdiv(x: Tensor, one: Tensor, other: Tensor, *, value: Any = None) -> Any:
    if not any(t.dtype.is_floating_point or t.dtype.is_complex for t in (one, other)):
        raise TypeError("a quotient of integers, which PyTorch refuses")
    return x + (one / other if value is None else value * one / other)


def _fill(x: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor):  # True, or a complex number
        return torch.full(x.shape, value, dtype=x.dtype, device=x.device)
    return value.to(x.dtype).expand(x.shape).clone()


FORMS: dict[Any, Form] = {
    aten.add.Tensor: _form(_add, "alpha"),
    aten.sub.Tensor: _form(_sub, "alpha"),
    aten.addcmul.default: _form(_addcmul, "value"),
    aten.addcdiv.default: _form(_addcdiv, "value"),
    aten.lerp.Scalar: _form(torch.lerp, "weight"),
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
    "repeat",
    "slice_backward",
    "stack",
)

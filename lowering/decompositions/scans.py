"""Running sums and products of tensors of dynamic sizes, in few enough dimensions.

IREE keeps a tile of all dimensions on the stack; of four or more it is too large.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from lowering.sizes import is_static

aten = torch.ops.aten
_UNCHANGED: Any = NotImplemented  # PyTorch then keeps the op whole
_MOST_DIMENSIONS = 3


def cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Decompose `aten.cumsum` of many dimensions: those before, and those after, are one each.

    Before: %1 = cumsum(%0, -2)                                with %0 of [s0, 3, 4, s1, s2]
    After:  %1 = view(cumsum(view(%0, [12*s0, s1, s2]), 1), [s0, 3, 4, s1, s2])
    """
    return _of_few(aten.cumsum.default, x, dim, dtype)


def cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Decompose `aten.cumprod` as `cumsum`."""
    return _of_few(aten.cumprod.default, x, dim, dtype)


def _of_few(op: Any, x: torch.Tensor, dim: int, dtype: torch.dtype | None) -> Any:
    if is_static(x) or x.dim() <= _MOST_DIMENSIONS:
        return _UNCHANGED
    dim %= x.dim()
    before, behind = math.prod(x.shape[:dim]), x.shape[dim + 1 :]
    after = [math.prod(behind)] if behind else []
    return op(x.reshape(before, x.shape[dim], *after), 1, dtype=dtype).view(x.shape)


DECOMPOSITIONS = {aten.cumprod.default: cumprod, aten.cumsum.default: cumsum}

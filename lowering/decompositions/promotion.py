"""The dtype in which PyTorch computes an op of two operands, by its rules of type promotion."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

Operand: TypeAlias = torch.Tensor | int | float


def common_dtype(*operands: Any) -> torch.dtype:
    """Return the dtype that operands, of any number and None among them, are promoted to."""
    given = [operand for operand in operands if operand is not None]
    kind = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
    return elementwise_dtypes(*given, type_promotion_kind=kind)[1]


def are_floats(x: Operand, y: Operand) -> bool:
    """Say whether two operands are computed with as floats: one of whole numbers may be among."""
    return torch.result_type(x, y).is_floating_point


def promoted(x: Operand, y: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """Give two operands in the dtype in which they are computed with, numbers as tensors."""
    dtype = torch.result_type(x, y)
    device = next(v.device for v in (x, y) if isinstance(v, torch.Tensor))

    def of(operand: Operand) -> torch.Tensor:
        if isinstance(operand, torch.Tensor):
            return operand.to(dtype)
        return torch.full((), operand, dtype=dtype, device=device)

    return of(x), of(y)

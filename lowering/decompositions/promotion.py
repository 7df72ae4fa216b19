"""The dtype in which PyTorch computes an op of two operands, by its rules of type promotion."""

from __future__ import annotations

from typing import TypeAlias

import torch

Operand: TypeAlias = torch.Tensor | int | float


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

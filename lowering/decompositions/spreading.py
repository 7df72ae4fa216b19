"""Zeros between the elements of a tensor: where the windows of a stride did not stand."""

from __future__ import annotations

import torch

aten = torch.ops.aten


def spread(x: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
    """Put `stride - 1` zeros between the elements along a dimension."""
    if stride == 1:
        return x
    behind = x.dim() - 1 - dim
    amounts = [0, 0] * behind + [0, stride - 1]
    apart: torch.Tensor = aten.constant_pad_nd.default(x.unsqueeze(dim + 1), amounts, 0)
    return apart.flatten(dim, dim + 1).narrow(dim, 0, (x.shape[dim] - 1) * stride + 1)

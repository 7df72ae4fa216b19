"""Weights that are a direction times a length, and their gradients.

Of a vector, each element has a length: there are no other dimensions, and a sum over none would be
one over all.
"""

from __future__ import annotations

import torch
from torch._decomp import decompositions

aten = torch.ops.aten


def weight_norm(
    v: torch.Tensor, g: torch.Tensor, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decompose `aten._weight_norm_interface` of a vector, and else as PyTorch does."""
    if v.dim() > 1:
        return decompositions._weight_norm_interface(v, g, dim)  # type: ignore[no-any-return]
    norms = torch.abs(v)
    return v * (g / norms), norms


def norm(x: torch.Tensor, p: float = 2) -> torch.Tensor:
    """Decompose `aten.norm` of all elements: the length of a weight that has but one."""
    length: torch.Tensor = torch.linalg.vector_norm(x, p)
    return length


def weight_norm_backward(
    gradient: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decompose `aten._weight_norm_interface_backward`.

    Args:
        gradient: of the weight `v * g / norms`.
        v: the directions.
        g: the lengths; 1 in all dimensions but `dim`, as `norms`.
        norms: of `v` over all other dimensions.
        dim: along which the weights are normed one by one.

    Returns:
        The gradients of `v` and of `g`.
    Source: Salimans and Kingma, Weight Normalization, 2016, equation 3.
    """
    others = [d for d in range(v.dim()) if d != dim]
    unit = v / norms
    along = gradient * unit
    if others:
        along = torch.sum(along, others, True)
    return (g / norms) * (gradient - along * unit), along


DECOMPOSITIONS = {
    aten._weight_norm_interface.default: weight_norm,
    aten._weight_norm_interface_backward.default: weight_norm_backward,
    aten.norm.Scalar: norm,
}

"""The gradients of weights that are a direction times a length."""

from __future__ import annotations

import torch

aten = torch.ops.aten


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
    along = torch.sum(gradient * unit, others, True)
    return (g / norms) * (gradient - along * unit), along


DECOMPOSITIONS = {aten._weight_norm_interface_backward.default: weight_norm_backward}

"""What `nn.Bilinear` computes, as products of matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

aten = torch.ops.aten


def trilinear(
    x: torch.Tensor,
    y: torch.Tensor,
    z: torch.Tensor,
    x_expanded: Sequence[int],
    y_expanded: Sequence[int],
    z_expanded: Sequence[int],
    summed: Sequence[int],
    unroll_dim: int = 1,
) -> torch.Tensor:
    """Decompose `aten._trilinear`, the sum of products of three tensors, into an `einsum`.

    The whole product is never made, nor lowered for sizes that are not known: IREE takes 20 s.

    Before: _trilinear(%x, %w, %y, [1, 3], [0], [1, 2], [2, 3])                  with %x of [N, I]
    After:  einsum("bi,oij,bj->bo", %x, %w, %y)              with %w of [O, I, J], %y of [N, J]

    Args:
        x, y, z: the tensors.
        x_expanded, y_expanded, z_expanded: dimensions of the product that each does not have.
        summed: dimensions of the product that the result does not have.
        unroll_dim: PyTorch's way to save memory.
    """
    every = range(x.dim() + len(x_expanded))
    has = [
        [d for d in every if d not in missing]
        for missing in (x_expanded, y_expanded, z_expanded, summed)
    ]
    found: torch.Tensor = torch.einsum(x, has[0], y, has[1], z, has[2], has[3])
    return found


DECOMPOSITIONS = {aten._trilinear.default: trilinear}

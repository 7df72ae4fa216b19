"""Samples of images at places that are no numbers, or infinite, as PyTorch's kernel takes them."""

from __future__ import annotations

import torch
from torch._decomp import get_decompositions

aten = torch.ops.aten
_OP = aten.grid_sampler_2d
_PYTORCHS = get_decompositions([_OP])[_OP.default]
_BILINEAR, _BICUBIC = 0, 2  # modes; the other is the nearest
_ZEROS, _BORDER = 0, 1  # paddings; the other is reflection


def grid_sampler_2d(
    image: torch.Tensor,
    grid: torch.Tensor,
    mode: int = _BILINEAR,
    padding: int = _ZEROS,
    align_corners: bool = False,
) -> torch.Tensor:
    """Decompose `aten.grid_sampler_2d`: what has no place is NaN, or at the first edge.

    PyTorch's own decomposition finds it outside of the image, which gives zero.

    Args:
        image: `[N, C, H, W]`.
        grid: `[N, h, w, 2]`, from -1 at the first edge to 1.
        mode: 0 for bilinear, 1 for the nearest, 2 for bicubic.
        padding: 0 for zeros, 1 for the border, 2 for reflection.
        align_corners: whether edges are the middles of the outmost elements.
    """
    if mode != _BICUBIC and padding != _ZEROS:
        is_place = grid == grid if padding == _BORDER else torch.isfinite(grid)  # asks for NaN
        grid = torch.where(is_place, grid, -1)
    samples: torch.Tensor = _PYTORCHS(image, grid, mode, padding, align_corners)
    if (mode, padding) != (_BILINEAR, _ZEROS):
        return samples
    height, width = (size * 0.5 - 0.5 * align_corners for size in image.shape[2:])
    x, y = (grid[..., 0] + 1) * width, (grid[..., 1] + 1) * height  # infinite places are NaN
    return samples + (x * 0 + y * 0).unsqueeze(1)


DECOMPOSITIONS = {_OP.default: grid_sampler_2d}

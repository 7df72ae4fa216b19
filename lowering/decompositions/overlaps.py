"""Sums of windows that overlap, as `istft` and what flows back through `unfold` take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
_PYTORCHS = get_decompositions([aten.unfold_backward])


def unfold_backward(
    gradient: torch.Tensor, sizes: Sequence[Any], dim: int, size: int, step: int
) -> Any:
    """Decompose `aten.unfold_backward` into one sum.

    PyTorch adds element by element of the window, or where an index says. Here windows are cut into
    blocks as long as a step: the blocks that meet in one place are read side by side.

    Before: %1 = unfold_backward(%g, [B, L], 1, 4, 2)              with %g of [B, N, 4]
    After:  %b = view(pad(%g, [1, 2] windows), [B, (N + 3) * 2, 2])
            %1 = slice(view(sum(view(%b[:, [1, 2, 3, 4, ...]], [B, N + 2, 2, 2]), 2), [B, -1]), L)
    """
    dim %= max(len(sizes), 1)
    if not _are_windows(gradient, sizes, dim, size, step):
        return _PYTORCHS[aten.unfold_backward.default](gradient, sizes, dim, size, step)
    before, after = list(sizes[:dim]), list(sizes[dim + 1 :])
    windows = gradient.movedim(-1, dim + 1)
    count, each = windows.shape[dim], -(-size // step)  # windows, and blocks of each
    windows = windows.expand(*before, count, size, *after)
    if statically_known_true(count < each):
        return _sum_of_few(windows, sizes, dim, step)
    around = [0, 0] * len(after) + [0, each * step - size, each - 1, each]
    padded = aten.constant_pad_nd.default(windows, around, 0)
    blocks = padded.reshape(*before, (count + 2 * each - 1) * each, step, *after)
    first = torch.arange(count + each, device=gradient.device).unsqueeze(-1)
    window = torch.arange(each, device=gradient.device)
    place = (first + window) * each + (each - 1 - window)
    met = torch.index_select(blocks, dim, place.reshape(-1))
    met = met.view(*before, count + each, each, step, *after)
    added = torch.sum(met, dim + 1, dtype=gradient.dtype)
    added = added.view(*before, (count + each) * step, *after)
    held = aten.slice.Tensor(added, dim, 0, sizes[dim])
    return held.clone(memory_format=torch.contiguous_format)


def _sum_of_few(windows: torch.Tensor, sizes: Sequence[Any], dim: int, step: int) -> torch.Tensor:
    """Sum windows that all but cover the tensor: each is put in a row as long as the tensor.

    Blocks of them would be as many as the square of what a window has.

    Before: %1 = unfold_backward(%g, [B, L], 1, 4, 1)              with %g of [B, N, 4]
    After:  %r = slice(view(pad(%g, [0, L + 1 - 4]), [B, N * (L + 1)]), N * L)     skewed by a step
            %1 = sum(view(%r, [B, N, L]), 1)
    """
    before, after = list(sizes[:dim]), list(sizes[dim + 1 :])
    count, size, length = windows.shape[dim], windows.shape[dim + 1], sizes[dim]
    around = [0, 0] * len(after) + [0, length + step - size]
    padded = aten.constant_pad_nd.default(windows, around, 0)
    flat = padded.reshape(*before, count * (length + step), *after)
    rows = aten.slice.Tensor(flat, dim, 0, count * length)
    added = torch.sum(rows.reshape(*before, count, length, *after), dim, dtype=windows.dtype)
    return added.clone(memory_format=torch.contiguous_format)


def _are_windows(
    gradient: torch.Tensor, sizes: Sequence[Any], dim: int, size: int, step: int
) -> bool:
    """Say whether a gradient has all windows of a tensor; of all others, it may have one."""
    if size <= 0 or step <= 0 or gradient.dtype is torch.bool:
        return False
    if not sizes or gradient.dim() != len(sizes) + 1:
        return False
    wanted = [*sizes, size]
    wanted[dim] = (sizes[dim] - size) // step + 1
    return all(
        statically_known_true(n == m) or (d not in (dim, len(sizes)) and n == 1)
        for d, (n, m) in enumerate(zip(gradient.shape, wanted, strict=True))
    )


DECOMPOSITIONS = {aten.unfold_backward.default: unfold_backward}

"""What flows back through a padding that repeats the edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten
_UNCHANGED: Any = NotImplemented  # PyTorch then keeps the op whole


def replication_pad_backward(
    gradient: torch.Tensor, x: torch.Tensor, padding: Sequence[int]
) -> Any:
    """Decompose `aten.replication_pad1d_backward`, `2d` and `3d`: an edge gets what it was read as.

    Before: replication_pad1d_backward(%g, %x, [2, 1])                         with %x of [C, L]
    After:  cat([sum(%g[:, :3], 1, True), %g[:, 3:L+1], sum(%g[:, L+1:], 1, True)], 1)
    """
    if min(padding) < 0 or 0 in x.shape:
        return _UNCHANGED
    for i, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        dim, size = x.dim() - 1 - i, x.shape[x.dim() - 1 - i]
        if size == 1:
            gradient = torch.sum(gradient, dim, True)
        elif before or after:
            first, last = before + 1, before + size - 1
            start = torch.sum(aten.slice.Tensor(gradient, dim, 0, first), dim, True)
            middle = aten.slice.Tensor(gradient, dim, first, last)
            end = torch.sum(aten.slice.Tensor(gradient, dim, last, last + 1 + after), dim, True)
            gradient = torch.cat([start, middle, end], dim)
    return gradient


DECOMPOSITIONS = {
    aten.replication_pad1d_backward.default: replication_pad_backward,
    aten.replication_pad2d_backward.default: replication_pad_backward,
    aten.replication_pad3d_backward.default: replication_pad_backward,
}

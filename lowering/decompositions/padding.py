"""Padding by sizes that may be negative, and what flows back through one that repeats the edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lowering.sizes import are_known

aten = torch.ops.aten


def replication_pad_backward(
    gradient: torch.Tensor, x: torch.Tensor, padding: Sequence[int]
) -> Any:
    """Decompose `aten.replication_pad1d_backward`, `2d` and `3d`: an edge gets what it was read as.

    Before: replication_pad1d_backward(%g, %x, [2, 1])                         with %x of [C, L]
    After:  cat([sum(%g[:, :3], 1, True), %g[:, 3:L+1], sum(%g[:, L+1:], 1, True)], 1)
    """
    if min(padding) < 0 or 0 in x.shape:
        return NotImplemented
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


def pad(x: torch.Tensor, amounts: Sequence[int], value: int | float = 0) -> Any:
    """Decompose `aten.constant_pad_nd` that takes away, or may: cuts first, then adds.

    torch-mlir takes away on the wrong side, and takes a symbol for what is to be added, whatever it
    turns out to be: the device would then write beyond the end.

    Before: constant_pad_nd(%x, [0, %n])                                       with %x of [C, L]
    After:  constant_pad_nd(%x[:, :L - max(0, -%n)], [0, max(0, %n)])
    """
    if all(map(_adds, amounts)):
        return NotImplemented
    added: list[int] = []
    for i, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        dim, size = x.dim() - 1 - i, x.shape[x.dim() - 1 - i]
        first, last = _at_least_0(-before), size - _at_least_0(-after)
        if not (_adds(before) and _adds(after)):
            x = torch.narrow(x, dim, first, last - first)  # or eager's error: there is less
        added += [_at_least_0(before), _at_least_0(after)]
    if are_known(added) and not any(added):
        return torch.clone(x)
    return aten.constant_pad_nd.default(x, added, value)


def _at_least_0(amount: int) -> int:
    larger: int = torch.sym_max(0, amount)  # type: ignore[no-untyped-call]
    return larger


def _adds(amount: int) -> bool:
    """Say whether it is certain that this is not negative."""
    return statically_known_true(amount >= 0)


DECOMPOSITIONS = {
    aten.constant_pad_nd.default: pad,
    aten.replication_pad1d_backward.default: replication_pad_backward,
    aten.replication_pad2d_backward.default: replication_pad_backward,
    aten.replication_pad3d_backward.default: replication_pad_backward,
}

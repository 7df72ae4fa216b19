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

    What was taken away gets nothing.

    Before: replication_pad1d_backward(%g, %x, [2, 1])                         with %x of [C, L]
    After:  cat([sum(%g[:, :3], 1, True), %g[:, 3:L+1], sum(%g[:, L+1:], 1, True)], 1)
    """
    pairs = [*zip(padding[::2], padding[1::2], strict=True)]
    if 0 in x.shape or _are_all_taken(x.shape[::-1], pairs):
        return NotImplemented
    for i, (before, after) in enumerate(pairs):
        dim = x.dim() - 1 - i
        if x.shape[dim] == 1:
            gradient = torch.sum(gradient, dim, True)
        elif before or after:
            first, last = max(before + 1, 0), gradient.shape[dim] - max(after + 1, 0)
            parts = [aten.slice.Tensor(gradient, dim, first, last)]
            if min(before, after) < 0:
                amounts = [0, 0] * i + [max(-before, 0), max(-after, 0)]
                parts = [aten.constant_pad_nd.default(parts[0], amounts)]
            if before >= 0:
                parts = [torch.sum(aten.slice.Tensor(gradient, dim, 0, first), dim, True), *parts]
            if after >= 0:
                end = aten.slice.Tensor(gradient, dim, last, last + 1 + after)
                parts = [*parts, torch.sum(end, dim, True)]
            gradient = torch.cat(parts, dim)
    return gradient


def _are_all_taken(sizes: Sequence[int], pairs: Sequence[tuple[int, int]]) -> bool:
    """Say whether padding takes all there is, and then adds the edge that it took."""
    amounts = [min(pair) for pair in pairs]
    return any(
        amount < 0 and size > 1 and size + amount < 1
        for size, amount in zip(sizes, amounts, strict=False)
    )


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

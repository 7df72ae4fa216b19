"""Products whose second factor is read as it lies in memory: not packed, not repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from lowering.decompositions.halves import HALVES
from lowering.nodes import converted
from lowering.rewrites.rule import Arguments, Rule
from lowering.sizes import are_empty, is_static

aten = torch.ops.aten
# What moves elements and computes nothing.
_MOVES = frozenset(
    {
        aten.clone.default,
        aten.expand.default,
        aten.permute.default,
        aten.squeeze.dim,
        aten.unsqueeze.default,
        aten.view.default,
    }
)
# To find out what a chain of moves does costs some 2 ns an element, at compile time.
_MOST_ELEMENTS = 1 << 24


def mm(x: torch.Tensor, matrix: torch.Tensor, is_transposed: bool) -> Any:
    """Rewrite `aten.mm` so that a matrix is read as it lies: by rows, or as the bytes it is of.

    A transposed matrix that is read once in a call, for one row, gains nothing by packing
    (`lowering.stages.flow.read_by_rows`).

    Before: %y = mm(%x, permute(%w, [1, 0]))                with %x of [1, K], %w of [N, K]
    After:  %y = unsqueeze(mv(%w, view(%x, [K])), 0)

    Of halves and of signed bytes that were made halves, the product is one of floats, in which it
    is added up anyway: so it reads the bytes (`lowering.stages.linalg.read_in_panels`).

    Before: %y = mm(%x, convert(%w, bf16))                  with %x of bf16, %w of i8
    After:  %y = convert(mm(convert(%x, f32), convert(%w, f32)), bf16)

    Args:
        x: `[M, K]`.
        matrix: `[N, K]` or `[K, N]`; of int8, if the second factor is what that is in floats.
        is_transposed: whether it is `[N, K]`.
    """
    is_widened = matrix.dtype == torch.int8 and x.dtype in HALVES
    if not (is_widened or x.dtype == torch.float32) or are_empty(x, matrix):
        return NotImplemented
    if is_transposed and x.shape[0] == 1:
        y = torch.mv(matrix.to(torch.float32), x.view(-1).to(torch.float32)).unsqueeze(0)
    elif is_widened:
        factor = matrix.t() if is_transposed else matrix
        y = torch.mm(x.to(torch.float32), factor.to(torch.float32))
    else:
        return NotImplemented
    return y.to(x.dtype)


def _matrix(node: fx.Node) -> Arguments | None:
    """Take the matrix that the second factor is in floats, or the transpose of, or both."""
    x, factor = cast(tuple[fx.Node, fx.Node], node.args)
    matrix, is_transposed = factor, False
    while True:
        source = converted(matrix)
        if source is not None and source.meta["val"].dtype == torch.int8:
            matrix = source
        elif matrix.target is aten.permute.default:
            matrix, dims = cast(tuple[fx.Node, Sequence[int]], matrix.args)
            is_transposed ^= [dim % 2 for dim in dims] == [1, 0]  # or it moves nothing
        else:
            return None if matrix is factor else (x, matrix, is_transposed)


def bmm(x: torch.Tensor, matrices: torch.Tensor, times: int, is_transposed: bool) -> Any:
    """Rewrite `aten.bmm` by matrices that are repeated, or by vectors.

    Grouped queries need no copies of a key; to pack rows for a vector takes as long as the product.

    Before: %y = bmm(%x, view(clone(expand(unsqueeze(%k, 1), [-1, R, -1, -1])), [H * R, K, N]))
                                                     with %x of [H * R, M, K], %k of [H, K, N]
    After:  %y = view(bmm(view(%x, [H, R * M, K]), %k), [H * R, M, N])

    Before: %y = bmm(%x, %v)                         with %x of [H, M, K], %v of [H, K, 1]
    After:  %y = sum(mul(%x, permute(%v, [0, 2, 1])), -1, True)

    Args:
        x: `[H * R, M, K]`.
        matrices: the H matrices, one after the other, in any shape.
        times: R, how often each of them stands in the second factor; 1: they are vectors.
        is_transposed: whether they are `[N, K]` in memory.
    """
    if times == 1:
        return (x * matrices.mT).sum(-1, keepdim=True)
    batch, count, width = x.shape
    stored = [batch // times, -1, width] if is_transposed else [batch // times, width, -1]
    factor = matrices.reshape(stored)
    y = torch.bmm(
        x.view(batch // times, times * count, width), factor.mT if is_transposed else factor
    )
    return y.view(batch, count, -1)


def _repeated(node: fx.Node) -> Arguments | None:
    """Take the matrices of which the second factor has several of each, side by side; or vectors.

    Of fewer bits than 32, the products would be rounded before they are added up.
    """
    x, factor = node.args
    moves, source = _moves_to(factor)
    if source is not None:
        with _disable_current_modes():
            found = _as_repeated(moves, source)
        if found is not None:
            return x, source, *found
    value = factor.meta["val"]  # type: ignore[union-attr]
    is_vector = value.shape[-1] == 1 and value.dtype in (torch.float32, torch.float64)
    return (x, factor, 1, False) if is_vector else None


def _as_repeated(moves: Sequence[fx.Node], source: fx.Node) -> tuple[int, bool] | None:
    """Say how often each matrix is there, and whether as its transpose; None: in another way.

    The moves are made with the places of the elements.
    """
    places = torch.arange(source.meta["val"].numel(), dtype=torch.int32)
    moved = places.view(source.meta["val"].shape)
    for move in moves:
        target: Any = torch.reshape if move.target is aten.view.default else move.target
        moved = target(moved, *move.args[1:], **move.kwargs)
    times = moved.numel() // places.numel()
    if len(moved) % times:
        return None
    first = moved[::times]
    if not torch.equal(moved, first.repeat_interleave(times, 0)):
        return None
    for is_transposed, stored in ((False, first), (True, first.mT)):
        if torch.equal(stored.reshape(-1), places):
            return times, is_transposed
    return None


def _moves_to(value: Any) -> tuple[list[fx.Node], fx.Node | None]:
    """Return the moves that end in a value, in order, from the last that repeats elements on.

    And what it is that these repeat; None if there is no such move.
    """
    moves: list[fx.Node] = []
    while isinstance(value, fx.Node) and value.target in _MOVES:
        source = value.args[0]
        moves.insert(0, value)
        assert isinstance(source, fx.Node)
        before, after = source.meta["val"], value.meta["val"]
        if not is_static(before, after) or after.numel() > _MOST_ELEMENTS:
            break
        if before.numel() < after.numel():
            return moves, source
        value = source
    return [], None


RULES: Mapping[Any, Rule] = {
    aten.bmm.default: Rule(bmm, _repeated),
    aten.mm.default: Rule(mm, _matrix),
}

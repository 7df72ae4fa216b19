"""Systems of equations with a triangular matrix: block by block of rows, each by its inverse."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

aten = torch.ops.aten
_BLOCK = 16  # rows whose inverse is made; that of more would lose digits
_MOST_ROWS = 128  # of larger ones, LAPACK on the host is the faster


def solve_triangular(
    matrix: torch.Tensor,
    right: torch.Tensor,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Any:
    """Decompose `aten.linalg_solve_triangular` of f32 and few rows, of a number that is known.

    Before: %x = linalg_solve_triangular(%a, %b, upper=False)        with %a of [..., 64, 64]
    After:  for each block i of 16 rows, from the top:
                %x[i] = inverse(%a[i, i]) @ %b[i] - (inverse(%a[i, i]) @ %a[i, :i]) @ %x[:i]
            %x is NaN from the row on where %a or %b is none, or infinite
    """
    rows = matrix.shape[-1]
    is_f32 = matrix.dtype is right.dtype is torch.float32  # IREE refuses such products of f64
    if not (is_f32 and isinstance(rows, int) and 0 < rows <= _MOST_ROWS):
        return NotImplemented
    if not left:
        matrix, right, upper = matrix.mT, right.mT, not upper
    if upper:  # the last unknown is then the first
        matrix, right = matrix.flip(-2, -1), right.flip(-2)
    solved = _solve_lower(matrix, right, is_unit=unitriangular)
    solved = solved.flip(-2) if upper else solved
    return solved if left else solved.mT


def _solve_lower(matrix: torch.Tensor, right: torch.Tensor, *, is_unit: bool) -> torch.Tensor:
    """Solve with what is on the diagonal (all ones, if it is a unit) and below, and not read else.

    A product with an inverse reads all rows of a block, those behind a row as zeros, of which one
    by a NaN is NaN: such numbers are taken out first, and told to the rows behind them at the end.
    """
    rows = matrix.shape[-1]
    row = torch.arange(rows, device=matrix.device)[:, None]
    below = torch.where(row > row.mT, matrix, 0)
    diagonal = torch.ones_like(matrix[..., :1])
    if not is_unit:
        diagonal = torch.where(row == row.mT, matrix, 0).sum(-1, keepdim=True)
    is_kept = torch.isfinite(below).all(-1, keepdim=True) & torch.isfinite(1 / diagonal)
    is_right = is_kept & torch.isfinite(right)
    solved = _solve_finite(
        torch.where(is_kept, below, 0),
        torch.where(is_kept, 1 / diagonal, 1),
        torch.where(is_right, right, 0),
    )
    lost = torch.where(is_right, 0, torch.ones_like(right))
    reached = torch.where(row >= row.mT, torch.ones_like(below), 0) @ lost
    return torch.where(reached > 0, math.nan, solved)


def _solve_finite(below: torch.Tensor, scale: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Solve, block by block.

    Args:
        below: what is below the diagonal, `[..., M, M]`.
        scale: one over what is on it, `[..., M, 1]`.
        right: `[..., M, N]`.
    """
    rows = below.shape[-1]
    over = -rows % _BLOCK
    below, right = F.pad(below, (0, over, 0, over)), F.pad(right, (0, 0, 0, over))
    scale = F.pad(scale, (0, 0, 0, over))
    starts = range(0, rows + over, _BLOCK)
    squares = [below[..., i : i + _BLOCK, i : i + _BLOCK] for i in starts]
    inverses = _inverse(torch.stack(squares, -3), _blocks(scale))
    factors, begun = inverses @ _blocks(below), inverses @ _blocks(right)
    solved = begun[..., 0, :, :]
    for number, start in enumerate(starts[1:], 1):
        known = factors[..., number, :, :start] @ solved
        solved = torch.cat([solved, begun[..., number, :, :] - known], -2)
    return solved[..., :rows, :]


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    *others, count, columns = rows.shape
    return rows.reshape(*others, count // _BLOCK, _BLOCK, columns)


def _inverse(below: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Invert lower triangular matrices: of the inverses of halves that of the whole.

    Args:
        below, scale: as for `_solve_finite`.

    Source: N. Higham, "Accuracy and Stability of Numerical Algorithms", 2002, 14.2, the block
        methods for the inversion of a triangular matrix.
    """
    size = below.shape[-1]
    row = torch.arange(size, device=below.device)[:, None]
    inverse = torch.where(row == row.mT, scale, 0)
    half = 1
    while half < size:
        is_corner = (row // half == row.mT // half + 1) & (row // half % 2 == 1)
        inverse = inverse - inverse @ torch.where(is_corner, below, 0) @ inverse
        half *= 2
    return inverse


DECOMPOSITIONS = {aten.linalg_solve_triangular.default: solve_triangular}

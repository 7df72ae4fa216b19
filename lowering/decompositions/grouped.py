"""Products of rows with one matrix a group, as mixtures of experts have them, in blocks of rows.

How many rows a group has is data, so the groups cannot be cut at sizes that the compiler knows.
Each begins a block of its own instead, and all blocks have as many rows; the last of a group has
some over, which nothing reads. The matrix of each block is chosen by index.

Source: T. Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts" (2022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowering.sizes import size_hint

aten = torch.ops.aten
# Rows of a block, and how many rows are multiplied in the time in which a matrix comes from memory.
_SIZES, _FREE = (1, 16, 32, 64), 20
# The same where a matrix is made of each block, written, read, and added to another.
_SIZES_OF_SUMS, _FREE_OF_SUMS = (16, 64, 256), 80


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Decompose a product whose rows are in groups: `y[s] = x[s] @ weight[group of s]`.

    Args:
        x: `[S, K]`, the rows of group 0 first.
        weight: `[G, K, N]`.
        ends: `[G]`, whole numbers: where each group ends, in rising order.

    Returns:
        `[S, N]`; rows after the last group are zeros.
    """
    if x.shape[0] == 0:
        return x.new_zeros(0, weight.shape[2])
    row = torch.arange(x.shape[0], device=x.device)
    is_grouped = (row < ends[-1])[:, None]
    if weight.shape[0] == 1:
        return torch.where(is_grouped, torch.mm(x, weight[0]), 0)
    blocks = _Blocks.of(x.shape[0], ends, _SIZES, _FREE)
    product = torch.bmm(blocks.of_each(x), _chosen(weight, blocks.owners))
    product = product.view(-1, weight.shape[2])
    found = torch.index_select(product, 0, blocks.place_of(row))
    return torch.where(is_grouped, found, 0)


def grouped_outer(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Decompose the sum over the rows of each group of `x[s]` times `y[s]`.

    Args:
        x: `[S, K]`.
        y: `[S, N]`.
        ends: `[G]`, see `grouped_mm`.

    Returns:
        `[G, K, N]`; a group without rows has zeros.
    """
    start = x.new_zeros(ends.shape[0], x.shape[1], y.shape[1])
    if x.shape[0] == 0:
        return start
    blocks = _Blocks.of(x.shape[0], ends, _SIZES_OF_SUMS, _FREE_OF_SUMS)
    is_of_group = (blocks.rows < blocks.ends[blocks.owners][:, None])[:, :, None]
    left, right = (torch.where(is_of_group, blocks.of_each(value), 0) for value in (x, y))
    return torch.index_add(start, 0, blocks.owners, torch.bmm(left.transpose(1, 2), right))


@dataclass(frozen=True)
class _Blocks:
    """The blocks of rows that groups are cut into; as many as there may be, the last ones unused.

    Attributes:
        size: rows of a block.
        starts: `[G]`: the first row of each group.
        ends: `[G]`: the row after its last.
        firsts: `[G]`: the first block of each group.
        owners: `[B]`: the group of each block.
        rows: `[B, size]`: its rows, beyond the group's last, too.
    """

    size: int
    starts: torch.Tensor
    ends: torch.Tensor
    firsts: torch.Tensor
    owners: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, rows: int, ends: torch.Tensor, sizes: tuple[int, ...], free: int) -> _Blocks:
        """Cut so many rows into blocks of the size that takes the least time.

        Args:
            rows: of all groups.
            ends: see `grouped_mm`.
            sizes: what a block may have.
            free: rows of a block up to which it takes the same time.
        """
        groups = ends.shape[0]
        known = size_hint(rows)
        size = min(sizes, key=lambda n: _most(known, groups, n) * max(free, n))
        count = _most(rows, groups, size)
        ends = ends.to(torch.int64)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        counts = torch.div(ends - starts + (size - 1), size, rounding_mode="trunc")
        block_ends = torch.cumsum(counts, 0)
        firsts = block_ends - counts
        block = torch.arange(count, device=ends.device)
        owners = _count_up_to(block_ends, block)
        first = starts[owners] + (block - firsts[owners]) * size
        each = first[:, None] + torch.arange(size, device=ends.device)
        return cls(size, starts, ends, firsts, owners, each)

    def of_each(self, x: torch.Tensor) -> torch.Tensor:
        """Take the rows of each block, and any in the place of those beyond the group's last.

        Args:
            x: `[S, K]`.

        Returns:
            `[B, size, K]`.
        """
        rows = self.rows.clamp(0, x.shape[0] - 1).flatten()
        return torch.index_select(x, 0, rows).view(-1, self.size, x.shape[1])

    def place_of(self, row: torch.Tensor) -> torch.Tensor:
        """Tell where rows are among those of all blocks, one after the other."""
        group = _count_up_to(self.ends, row)
        place = self.firsts[group] * self.size + row - self.starts[group]
        return place.clamp(0, self.rows.shape[0] * self.size - 1)


def _most(rows: Any, groups: int, size: int) -> Any:
    """Count the blocks that rows in so many groups may take."""
    if size == 1:
        return rows
    return (rows + groups * (size - 1)) // size


def _count_up_to(ends: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Tell in which group a place is: how many end before; the last one has all that is after."""
    count = (ends[None] <= place[:, None]).sum(1)
    return count.clamp(0, ends.shape[0] - 1)


def _chosen(weight: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    """Choose matrices; those that lie transposed in memory are chosen as they lie."""
    if weight.stride(1) == 1 and weight.stride(2) != 1:
        return torch.index_select(weight.transpose(1, 2), 0, owners).transpose(1, 2)
    return torch.index_select(weight, 0, owners)


def _of_aten(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Decompose `aten._grouped_mm` where rows, or what is summed over, is in groups."""
    if offs is None or bias is not None or out_dtype not in (None, x.dtype):
        return NotImplemented
    if x.dim() == 2 and weight.dim() == 3:
        return grouped_mm(x, weight, offs)
    if x.dim() == 2 and weight.dim() == 2:
        return grouped_outer(x.t(), weight, offs)
    return NotImplemented


def _of_transformers(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decompose `transformers.grouped_mm_fallback_backward`: gradients of rows and of matrices."""
    return grouped_mm(gradient, weight.transpose(1, 2), ends), grouped_outer(x, gradient, ends)


DECOMPOSITIONS = {aten._grouped_mm.default: _of_aten}
# Ops of libraries that may not be there; they exist once these are imported.
_OF_LIBRARIES: Mapping[str, Callable[..., Any]] = {
    "transformers::grouped_mm_fallback": grouped_mm,
    "transformers::grouped_mm_fallback_backward": _of_transformers,
}


def of_libraries() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Return the decompositions of those ops of libraries that exist."""
    found = {}
    for name, function in _OF_LIBRARIES.items():
        library, op = name.split("::")
        if packet := getattr(getattr(torch.ops, library), op, None):
            found[packet.default] = function
    return found

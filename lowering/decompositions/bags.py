"""Sums and means of bags of embeddings, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
_SUM, _MEAN = 0, 1  # modes; the third is the maximum


def embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Decompose `aten._embedding_bag` and `_embedding_bag_forward_only`.

    Before: _embedding_bag(%w, %i, %o)                         with %i of [L], %o of [B]: the starts
    After:  %b = cumsum(scatter_add(zeros(L + 1), %o, 1))[:L] - 1        which bag an element is in
            index_add(zeros(B, D), 0, %b, embedding(%w, %i))

    Args:
        weight: `[N, D]`, of f32 or f64.
        indices: `[L]`.
        offsets: `[B]`, where each bag starts; with `include_last_offset` one more, the end.
        scale_grad_by_freq: for the backward, as `sparse`.
        mode: 0 for the sum, 1 for the mean.
        sparse: whether the gradient shall be.
        per_sample_weights: `[L]`, or None.
        include_last_offset: see `offsets`. Eager's sizes do not end with it.
        padding_idx: an index that counts for nothing, if not negative.

    Returns:
        The bags, `[B, D]`; for the backward the bag of each element, `[L]`, their sizes, `[B]`,
        and what only the maximum has.
    """
    if mode not in (_SUM, _MEAN) or sparse or weight.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    length, count = indices.shape[0], offsets.shape[0] - include_last_offset
    starts = offsets.new_zeros([length + 1])
    starts = torch.scatter_add(starts, 0, offsets, torch.ones_like(offsets))
    bag = aten.slice.Tensor(torch.cumsum(starts, 0), 0, 0, length) - 1
    counts = is_in = _counts(indices, padding_idx)
    if include_last_offset:
        bag = _ended(bag, offsets)
        is_in = _cut(is_in, offsets, count, weight.dtype, padding_idx)
    rows = _weighed(aten.embedding.default(weight, indices), per_sample_weights, is_in)
    bags = torch.index_add(weight.new_zeros([count, weight.shape[1]]), 0, bag, rows)
    sizes = torch.scatter_add(offsets.new_zeros([count]), 0, bag, counts.to(offsets.dtype))
    if mode == _MEAN:
        bags = bags / torch.clamp(sizes, min=1).unsqueeze(-1)
    return bags, bag, sizes, torch.zeros_like(sizes)


def embedding_bag_backward(
    gradient: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bag: torch.Tensor,
    sizes: torch.Tensor,
    maximum_indices: torch.Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> Any:
    """Decompose `aten._embedding_bag_backward`: each element gives its bag's gradient to its row.

    Args:
        gradient: of the bags, `[B, D]`.
        bag, sizes: as `embedding_bag` returns them; the others as it takes them.

    Returns:
        The gradient of the weight, `[num_weights, D]`.
    """
    is_known = gradient.dtype in (torch.float32, torch.float64)
    if mode not in (_SUM, _MEAN) or sparse or scale_grad_by_freq or not is_known:
        return NotImplemented
    if mode == _MEAN:
        gradient = gradient / torch.clamp(sizes, min=1).unsqueeze(-1)
    counts = _counts(indices, padding_idx)
    counts = _cut(counts, offsets, gradient.shape[0], gradient.dtype, padding_idx)
    rows = _weighed(torch.index_select(gradient, 0, bag), per_sample_weights, counts)
    return torch.index_add(gradient.new_zeros([num_weights, gradient.shape[1]]), 0, indices, rows)


def weights_backward(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bag: torch.Tensor,
    mode: int,
    padding_idx: int = -1,
) -> Any:
    """Decompose `aten._embedding_bag_per_sample_weights_backward`; arguments as above.

    Returns:
        The gradient of `per_sample_weights`, `[L]`.
    """
    if mode != _SUM or weight.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    rows = aten.embedding.default(weight, indices) * torch.index_select(gradient, 0, bag)
    counts = _counts(indices, padding_idx)
    counts = _cut(counts, offsets, gradient.shape[0], weight.dtype, padding_idx)
    return torch.where(counts, torch.sum(rows, -1), 0)


def _counts(indices: torch.Tensor, padding_idx: int) -> torch.Tensor:
    """Say which elements are no padding."""
    if padding_idx < 0:
        return torch.ones_like(indices, dtype=torch.bool)
    return indices != padding_idx


def _ended(bag: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Give what is beyond the end to the last bag."""
    last = offsets.shape[0] - 2
    end, start = (aten.select.int(offsets, 0, place) for place in (-1, last))
    return torch.minimum(bag, last + (end < start).to(bag.dtype))  # no such bag: an error


def _cut(
    counts: torch.Tensor, offsets: torch.Tensor, bags: int, dtype: torch.dtype, padding_idx: int
) -> torch.Tensor:
    """Say which elements count that are not beyond the end, where eager's kernels leave those out.

    They are the kernels of f32 without padding. What eager's backward gives such elements is read
    beyond its gradient: here it is zero.
    """
    if offsets.shape[0] == bags or dtype is not torch.float32 or padding_idx >= 0:
        return counts
    end: torch.Tensor = aten.select.int(offsets, 0, -1)
    return counts & (torch.arange(counts.shape[0], device=counts.device) < end)


def _weighed(
    rows: torch.Tensor, weights: torch.Tensor | None, counts: torch.Tensor
) -> torch.Tensor:
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    return torch.where(counts.unsqueeze(-1), rows, 0)


DECOMPOSITIONS = {
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_backward.default: embedding_bag_backward,
    aten._embedding_bag_forward_only.default: embedding_bag,
    aten._embedding_bag_per_sample_weights_backward.default: weights_backward,
}

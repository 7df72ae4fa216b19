"""Scaled dot product attention of the CPU, forward and backward, in ops that the device runs.

PyTorch's own decomposition of the forward is for inference: in the place of the row statistics
(`logsumexp`), which the backward reads, it returns something else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lowering.sizes import is_static

aten = torch.ops.aten
# A third of it is up to 5 % faster, and takes twice as long to compile: each block is a program's
# part of its own. (1500 queries and keys of 8 heads, 1024 of 12, on an EPYC with 32 MB of cache.)
_BLOCK_BYTES = 18 << 20
# Of causal attention, each block sees as many keys more: of another number, IREE refuses the best
# sets of flags, and the next take twice as long to compile (1024 of 12 heads: 6.3 s and 2.6).
_ROWS = 16
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decompose `aten._scaled_dot_product_flash_attention_for_cpu`.

    Args:
        query: `[B, H, L, E]`.
        key: `[B, K, S, E]`; `H` is a multiple of `K` (grouped queries).
        value: `[B, K, S, E]`.
        dropout_p: 0; PyTorch takes another op for dropout.
        is_causal: query `i` sees the keys up to `i`.
        attn_mask: added to the scores; broadcast to `[B, H, L, S]`.
        scale: of the scores; `1/sqrt(E)` by default.

    Returns:
        The result, `[B, H, L, E]`, and the logarithm of the sum of the exponentials of each row's
        scores, `[B, H, L]`. A row that is masked as a whole is 0 in both, as the kernel has it.
    """
    block = _block(query, key)
    if block is None:
        return _attend(query, key, value, is_causal, attn_mask, scale)
    own, step = block
    parts = []
    if own < query.shape[0]:
        for start in range(0, query.shape[0], own):
            part = slice(start, start + own)
            mask = _part_of(attn_mask, -4, part)
            tensors = query[part], key[part], value[part]
            parts.append(attention(*tensors, 0.0, is_causal, attn_mask=mask, scale=scale))
        return _joined(parts, 0)
    for start in range(0, query.shape[-2], step):
        end = start + step
        seen = end if is_causal else None  # no query of the block sees a later key
        mask = _part_of(attn_mask, -2, slice(start, end))
        tensors = query[:, :, start:end], key[:, :, :seen], value[:, :, :seen]
        parts.append(_attend(*tensors, is_causal, mask, scale, start))
    return _joined(parts, 2)


def _part_of(mask: torch.Tensor | None, dim: int, part: slice) -> torch.Tensor | None:
    """Return what of a mask is for a part of a dimension, over which it may be broadcast."""
    if mask is None or mask.dim() < -dim or mask.shape[dim] == 1:
        return mask
    cut: torch.Tensor = aten.slice.Tensor(mask, dim, part.start, part.stop)
    return cut


def _joined(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the results of parts, and their statistics."""
    results, statistics = zip(*parts, strict=True)
    return torch.cat(results, dim), torch.cat(statistics, dim)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    attn_mask: torch.Tensor | None,
    scale: float | None,
    start: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `attention` does, for the queries from `start` on; the sums divide the result.

    Heads that nothing is added to are a batch: IREE computes a row's maximum and its exponentials
    in one device program where both have the dimensions of the product that reads them. Of unknown
    sizes, where heads are split in the program that packs them, it refuses the best sets of flags.
    """
    whole = query.shape[:-1]
    key, value = (_for_each_head(t, query) for t in (key, value))
    if attn_mask is None and is_static(query, key):
        query, key, value = map(_as_batch, (query, key, value))
    scores = _scores(query, key, is_causal, attn_mask, scale, start)
    largest = scores.amax(-1, keepdim=True)
    if attn_mask is not None:
        largest = torch.where(largest == -math.inf, 0.0, largest)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    if attn_mask is not None:
        total = torch.where(total == 0.0, 1.0, total)
    result = torch.matmul(weights, value.to(weights.dtype)) / total
    result = result.to(query.dtype).reshape(*whole, value.shape[-1])
    return result, (largest + torch.log(total)).reshape(whole)


def attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decompose `aten._scaled_dot_product_flash_attention_for_cpu_backward`.

    Args:
        grad_out: gradient of the result, `[B, H, L, E]`.
        query, key, value, dropout_p, is_causal, attn_mask, scale: as for `attention`.
        out: its result.
        logsumexp: its row statistics.

    Returns:
        The gradients of query, key and value.
    Source: Dao et al., FlashAttention, 2022, appendix B.
    """
    scores = _scores(query, key, is_causal, attn_mask, scale)
    weights = torch.exp(scores - logsumexp.unsqueeze(-1))
    grad, result = grad_out.to(weights.dtype), out.to(weights.dtype)
    values, keys = (_for_each_head(t, query).to(weights.dtype) for t in (value, key))
    grad_value = torch.matmul(weights.mT, grad)
    grad_weights = torch.matmul(grad, values.mT)
    row = (grad * result).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - row) * _factor(query, scale)
    grad_query = torch.matmul(grad_scores, keys)
    grad_key = torch.matmul(grad_scores.mT, query.to(weights.dtype))
    return (
        grad_query.to(query.dtype),
        _over_heads(grad_key, key).to(key.dtype),
        _over_heads(grad_value, value).to(value.dtype),
    )


DECOMPOSITIONS = {_FORWARD: attention, _BACKWARD: attention_backward}


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    is_causal: bool,
    attn_mask: torch.Tensor | None,
    scale: float | None,
    start: int = 0,
) -> torch.Tensor:
    """Return the masked scores, `[B, H, L, S]`, at least in f32, in which the kernel sums.

    The queries are those from `start` on. They are scaled, not their scores: there are fewer.
    """
    kind = torch.promote_types(query.dtype, torch.float32)
    keys = _for_each_head(key, query)
    scores = torch.matmul(query.to(kind) * _factor(query, scale), keys.to(kind).mT)
    if is_causal:
        rows, columns = scores.shape[-2:]
        sees = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(start)
        scores = torch.where(sees, scores, -math.inf)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        return torch.where(attn_mask, scores, -math.inf)
    return scores if attn_mask is None else scores + attn_mask


def _block(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int] | None:
    """Return how much of a batch, and how many queries, have scores that stay in the caches.

    None: all have, or they cannot be cut. A batch is cut first: its parts lie one behind the other,
    and all queries of one are more rows of a product than a few queries of all.
    """
    if not is_static(query, key):
        return None
    batch, heads, rows, _ = query.shape
    nbytes = 4 * heads * rows * key.shape[-2]  # of one of the batch
    if batch * nbytes <= _BLOCK_BYTES or batch == rows == 1:
        return None
    parts = range(max(1, min(batch, _BLOCK_BYTES // nbytes)), 0, -1)
    own = next(n for n in parts if batch % n == 0)
    most = math.ceil(rows / math.ceil(own * nbytes / _BLOCK_BYTES))
    return own, min(rows, -(-most // _ROWS) * _ROWS)


def _factor(query: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _for_each_head(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat keys or values for the queries that share them."""
    batch, heads, rows, width = tensor.shape
    shared = query.shape[1] // heads if query.shape[1] != heads else 1
    if shared == 1:
        return tensor
    wide = tensor.unsqueeze(2).expand(batch, heads, shared, rows, width)
    return wide.reshape(batch, heads * shared, rows, width)


def _as_batch(tensor: torch.Tensor) -> torch.Tensor:
    """Return `[B, H, L, E]` as `[B * H, 1, L, E]`."""
    batch, heads, rows, width = tensor.shape
    return tensor.reshape(batch * heads, 1, rows, width)


def _over_heads(grad: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Sum a gradient over the queries that share a key or value."""
    batch, heads, rows, width = grad.shape
    own = tensor.shape[1]
    if own == heads:
        return grad
    return grad.reshape(batch, own, heads // own, rows, width).sum(2)

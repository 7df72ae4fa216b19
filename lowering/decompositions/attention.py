"""Scaled dot product attention of the CPU, forward and backward, in ops that the device runs.

PyTorch's own decomposition of the forward is for inference: in the place of the row statistics
(`logsumexp`), which the backward reads, it returns something else.
"""

from __future__ import annotations

import math

import torch

aten = torch.ops.aten
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
    kind = query.dtype
    scores = _scores(query, key, is_causal, attn_mask, scale)
    weights = torch.softmax(scores, -1)
    logsumexp = torch.logsumexp(scores, -1)
    if attn_mask is not None:
        is_masked = logsumexp == -math.inf
        weights = torch.where(is_masked.unsqueeze(-1), 0.0, weights)
        logsumexp = torch.where(is_masked, 0.0, logsumexp)
    result = torch.matmul(weights, _for_each_head(value, query).to(weights.dtype))
    return result.to(kind), logsumexp


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
) -> torch.Tensor:
    """Return the masked scores, `[B, H, L, S]`, at least in f32, in which the kernel sums."""
    kind = torch.promote_types(query.dtype, torch.float32)
    keys = _for_each_head(key, query)
    scores = torch.matmul(query.to(kind), keys.to(kind).mT) * _factor(query, scale)
    if is_causal:
        rows, columns = scores.shape[-2:]
        sees = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
        scores = torch.where(sees, scores, -math.inf)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        return torch.where(attn_mask, scores, -math.inf)
    return scores if attn_mask is None else scores + attn_mask


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


def _over_heads(grad: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Sum a gradient over the queries that share a key or value."""
    batch, heads, rows, width = grad.shape
    own = tensor.shape[1]
    if own == heads:
        return grad
    return grad.reshape(batch, own, heads // own, rows, width).sum(2)

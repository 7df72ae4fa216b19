"""Attention in blocks is attention: forms, masks, statistics, and what is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lowering.decompositions import attention as module
from lowering.decompositions.attention import attention

CHANCE = torch.rand(7, 5, generator=torch.Generator().manual_seed(1))
MASK = torch.zeros(7, 5).masked_fill(CHANCE < 0.3, -math.inf)
MASK[2] = -math.inf  # a row without keys

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "causal": {"is_causal": True},
    "masked": {"attn_mask": MASK},
    "one row for all": {"attn_mask": MASK[:1]},
    "bool mask": {"attn_mask": MASK == 0},
    "a mask for each": {"attn_mask": torch.stack([MASK, MASK.roll(1, 0), 2 * MASK])[:, None]},
    "a mask for each head": {"attn_mask": torch.stack([MASK, MASK.roll(1, 0)])},
}


def operands(heads: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2, 7, 4), (3, heads, 5, 4), (3, heads, 5, 4)]
    return tuple(torch.randn(s, generator=generator) for s in shapes)


@pytest.fixture(params=[None, (3, 1), (3, 3), (3, 7), (1, 7), (1, 3)])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much of the batch and how many queries are a block; None: what the default says, all."""
    if request.param:
        monkeypatch.setattr(module, "_block", lambda query, key: request.param)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_are_the_whole(form: str, block: None) -> None:
    q, k, v = operands()
    result, logsumexp = attention(q, k, v, **FORMS[form])
    torch.testing.assert_close(result, F.scaled_dot_product_attention(q, k, v, **FORMS[form]))
    whole = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, FORMS[form].get("is_causal", False),
        attn_mask=None if "attn_mask" not in FORMS[form] else additive(FORMS[form]["attn_mask"]),
        scale=FORMS[form].get("scale"),
    )  # fmt: skip
    torch.testing.assert_close(logsumexp, whole[1])


def additive(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask as the kernel takes it: added to the scores, of all dimensions."""
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    return mask.expand(3, 2, 7, 5).contiguous()


def test_queries_that_share_keys(block: None) -> None:
    q, k, v = operands(heads=1)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v)[0], expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_goes_where_it_goes_in_eager(value: float, block: None) -> None:
    q, k, v = operands()
    k[0, 1, 3, 2], v[1, 0, 1, 1] = value, value
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(attention(q, k, v)[0], expected, equal_nan=True)


def test_scores_that_do_not_fit_the_caches_are_taken_in_blocks() -> None:
    def block(batch: int, heads: int, rows: int, keys: int) -> tuple[int, int] | None:
        q, k = torch.empty(batch, heads, rows, 64), torch.empty(batch, heads, keys, 64)
        return module._block(q, k)

    assert block(1, 12, 128, 128) is None
    assert block(1, 8, 1500, 1500) == (1, 384)  # whole vectors of keys, if these are causal
    assert block(8, 8, 1500, 1500) == (1, 384)  # one of the batch at a time
    assert block(1, 12, 1024, 1024) == (1, 352)
    assert block(32, 12, 197, 197) == (8, 197)  # as many as divide it, with all their queries
    assert block(7, 12, 512, 512) == (1, 512)
    assert block(1, 8, 1, 1 << 20) is None
    assert block(1, 8, 0, 16) is None

"""Attention in blocks of queries is attention: forms, masks, statistics, and what is not finite."""

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
}


def operands(heads: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2, 7, 4), (3, heads, 5, 4), (3, heads, 5, 4)]
    return tuple(torch.randn(s, generator=generator) for s in shapes)


@pytest.fixture(params=[0, 1, 3, 7])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many queries go into a block; 0: what the default says, all of them."""
    if request.param:
        monkeypatch.setattr(module, "_rows_at_once", lambda query, key: request.param)
    return int(request.param)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_are_the_whole(form: str, rows: int) -> None:
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


def test_queries_that_share_keys(rows: int) -> None:
    q, k, v = operands(heads=1)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v)[0], expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_goes_where_it_goes_in_eager(value: float, rows: int) -> None:
    q, k, v = operands()
    k[0, 1, 3, 2], v[1, 0, 1, 1] = value, value
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(attention(q, k, v)[0], expected, equal_nan=True)


def test_scores_that_do_not_fit_the_caches_are_taken_in_equal_blocks() -> None:
    def blocks(heads: int, rows: int, keys: int) -> int:
        q, k = torch.empty(1, heads, rows, 64), torch.empty(1, heads, keys, 64)
        return module._rows_at_once(q, k)

    assert blocks(12, 128, 128) == 0
    assert blocks(8, 1500, 1500) == 125
    assert blocks(8, 1, 1 << 20) == 0
    assert blocks(8, 0, 16) == 0

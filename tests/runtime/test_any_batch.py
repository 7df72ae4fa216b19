"""Products of matrices in a batch of any size, and what is computed of them, are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, v: scaled_dot_product_attention(q[:, None], k[:, None], v[:, None]),
    "divided by sums": lambda q, k, v: (q @ k.mT) / q.abs().sum(-1, True),
    "divided by sums and more": lambda q, k, v: (q @ k.mT + 1) / (q.exp().sum(-1, True) + 0.1),
    "divided by maxima": lambda q, k, v: (q @ k.mT) / q.abs().amax(-1, True),
    "less their means": lambda q, k, v: (q @ k.mT) - (q @ k.mT).mean(-1, True),
    "times sums of columns": lambda q, k, v: (q @ k.mT) * k.mT.exp().sum(-2, True),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rows", [16, 17])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_of_batched_products(name: str, rows: int, dim: int) -> None:
    torch._dynamo.reset()
    function, inputs = FUNCTIONS[name], [torch.randn(4, rows, 24) for _ in range(3)]
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, dim)
    compiled = torch.compile(function, backend="npu_iree")
    assert_same(compiled(*inputs), function(*inputs))
    more = [torch.cat([t, t * 0.5], dim) for t in inputs]
    assert_same(compiled(*more), function(*more))

"""Products of matrices in a batch of any size, and what is computed of them, are eager's."""

from __future__ import annotations

from collections import Counter
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


def test_several_writes_into_one_tensor_of_any_size() -> None:
    def shifted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.new_zeros(x.shape)
        first, second = y.clone(), y.clone()
        y[:, 1:] = x[:, :-1].clone()
        y[:, 0] = 2
        first[1:] = x[:-1]
        second[:, 2:] = x[:, 2:]
        return y.masked_fill_(y == -100, 1), first + second

    for dtype in (torch.int64, torch.float32):
        x = torch.arange(3, 29).reshape(2, 13).to(dtype)
        compiled = torch.compile(shifted, backend="npu_iree", dynamic=True)
        for part in (x, x[:, :7]):
            assert_same(compiled(part), shifted(part))


def test_sizes_that_are_sums_of_many() -> None:
    def padded(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        n = x.shape[0] + y.shape[0] + z.shape[0] + 3
        return torch.nn.functional.pad(x, (0, n - x.shape[0])).exp() + n

    compiled = torch.compile(padded, backend="npu_iree", dynamic=True)
    for n in (3, 5):
        inputs = [torch.randn(n), torch.randn(n + 1), torch.randn(n + 4)]
        assert_same(compiled(*inputs), padded(*inputs))


def test_group_norm_of_any_batch(counts: Counter[str]) -> None:
    norm = torch.nn.GroupNorm(2, 6)
    torch.nn.init.normal_(norm.weight)
    compiled = torch.compile(norm, backend="npu_iree", dynamic=True)
    for batch in (3, 5):
        x = torch.randn(batch, 6, 4, 4)
        assert_same(compiled(x), norm(x))
    assert counts["host_ops"] == 0

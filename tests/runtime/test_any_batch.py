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


W = torch.randn(32, 24)
SPLIT: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "layer": (lambda x, y: (x @ W) @ y, (2, 13, 32)),
    "layer of rows": (lambda x, y: (x @ W).reshape(2, 14, 24) @ y, (28, 32)),
    "norm": (lambda x, y: torch.nn.functional.layer_norm(x, (24,)) @ y, (2, 29, 24)),
    "sum": (lambda x, y: x.sum(1).reshape(2, 13, 24) @ y, (26, 5, 24)),
    "transposed": (lambda x, y: y.mT @ x.t().reshape(2, 15, 24).mT, (24, 30)),
    "grouped heads": (lambda x, y: x.transpose(1, 2).reshape(2, -1, 24) @ y, (1, 13, 4, 24)),
    "embedding": (lambda x, y: W[x.long() % 32].reshape(2, 13, 24) @ y, (26,)),
}


@pytest.mark.parametrize("dim", [None, 0])
@pytest.mark.parametrize("name", SPLIT)
def test_products_of_rows_that_were_split(name: str, dim: int | None, counts: Counter[str]) -> None:
    """Each batch of rows is padded by itself, though all of them would fill as many tiles."""
    torch._dynamo.reset()
    function, shape = SPLIT[name]
    x, y = torch.randn(shape).abs() * 4, torch.randn(2, 24, 20)
    if dim is not None:
        torch._dynamo.maybe_mark_dynamic(x, dim)
    assert_same(torch.compile(function, backend="npu_iree")(x, y), function(x, y))
    assert counts["host_ops"] == 0


PACKED: dict[str, Callable[..., Any]] = {
    "both factors": lambda x, y: x.square() @ (y * x.mT),
    "stored, too": lambda x, y: (lambda z: (x @ z, z, z.sum()))(y.square()),
    "repeated": lambda x, y: x[:1].expand(3, -1, -1) @ (y * y[0, :1]),
    "a mask": lambda x, y: (x > 0).to(x.dtype) @ torch.where(y > x.mT, y, float("inf")).mT,
    "columns": lambda x, y: x.flatten(0, 1).mT @ (y.relu() + y[:, :, :1]).reshape(39, 13),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PACKED)
def test_products_of_what_is_computed_of_odd_rows(
    name: str, dtype: torch.dtype, counts: Counter[str]
) -> None:
    x, y = (torch.randint(-4, 5, (3, 13, 13)).to(dtype) for _ in range(2))
    compiled = torch.compile(PACKED[name], backend="npu_iree")
    assert_same(compiled(x, y), PACKED[name](x, y))
    assert counts["host_ops"] == counts["refused_flags"] == 0


@pytest.mark.parametrize("length", [pytest.param(13, marks=pytest.mark.sweep), 31])
def test_grouped_attention(length: int) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    q, k, v = (torch.randn(1, length, heads, 16).transpose(1, 2) for heads in (4, 2, 2))
    assert_same(torch.compile(attention, backend="npu_iree")(q, k, v), attention(q, k, v))


STRIDED = {
    "in groups": (torch.nn.Conv2d(4, 4, 3, 2, 1, groups=2), (4, 8, 8)),
    "2 dimensions": (torch.nn.Conv2d(3, 4, 3, 2, 1), (3, 9, 9)),
    "transposed": (torch.nn.ConvTranspose2d(3, 4, 3, 2, 1), (3, 5, 5)),
}


@pytest.mark.parametrize("name", STRIDED)
def test_training_of_a_strided_convolution(name: str, counts: Counter[str]) -> None:
    torch._dynamo.reset()
    layer, shape = STRIDED[name]
    compiled = torch.compile(layer, backend="npu_iree")
    for batch in (2, 3, 5):
        x = torch.randn(batch, *shape)
        torch._dynamo.mark_dynamic(x, 0)
        gradients = []
        for function in (layer, compiled):
            layer.zero_grad()
            given = x.clone().requires_grad_()
            function(given).square().sum().backward()
            gradients.append([given.grad, *(p.grad for p in layer.parameters())])
        assert_same(*gradients)
    assert counts["unsupported_ops"] == 0


@pytest.mark.parametrize(
    "dtype", [torch.int64, pytest.param(torch.float32, marks=pytest.mark.sweep)], ids=str
)
def test_several_writes_into_one_tensor_of_any_size(dtype: torch.dtype) -> None:
    def shifted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.new_zeros(x.shape)
        first, second = y.clone(), y.clone()
        y[:, 1:] = x[:, :-1].clone()
        y[:, 0] = 2
        first[1:] = x[:-1]
        second[:, 2:] = x[:, 2:]
        return y.masked_fill_(y == -100, 1), first + second

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

"""Products of few rows, and what is computed of them in the same device program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, linear, pad, silu, softmax

# Of `y`, `[1, N]`, the result of a product, and `z`, `[N, 6]`.
FOLLOWERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a row": lambda y, z: gelu(y) + z[:, 0],
    "itself by itself": lambda y, z: y.t() * y,
    "broadcast along columns": lambda y, z: y.t() * z,
    "broadcast along rows": lambda y, z: y * z.t(),
    "a reduction": lambda y, z: softmax(y * 2, -1) @ z,
    "two reductions": lambda y, z: layer_norm(y, y.shape[-1:]),
    "another shape": lambda y, z: y.view(2, -1).t().relu(),
    "part of it": lambda y, z: pad(y[:, ::2] * 3, (1, 2)),
    "another dtype": lambda y, z: (y.double() * 2, (y * 9).long()),
    "several": lambda y, z: (y + 1, y.sum(), y.amax(), y.flip(-1)),
}


@pytest.mark.parametrize("follow", FOLLOWERS.values(), ids=FOLLOWERS)
@pytest.mark.parametrize(("width", "rows"), [(64, 48), (32, 10)])  # whole groups of rows, and not
def test_what_follows_a_product_with_a_vector(
    follow: Callable[[torch.Tensor, torch.Tensor], Any], width: int, rows: int
) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, z: torch.Tensor) -> Any:
        return follow(linear(x, w), z)

    args = torch.randn(1, width), torch.randn(rows, width), torch.randn(rows, 6)
    compiled = torch.compile(function, backend="npu_iree", options={"fallback": "error"})
    torch.testing.assert_close(compiled(*args), function(*args), rtol=1e-4, atol=1e-4)


# Of `y`, `[M, N]`, the result of a product, and `z`, `[5, N]`.
MORE_FOLLOWERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a row": lambda y, z: gelu(y + z[0]),
    "among zeros": lambda y, z: pad(y[:, None], (0, 0, 0, 6)) * z[0],
    "among zeros, added up": lambda y, z: pad(y[:, None].relu(), (0, 0, 2, 126)).sum(-1),
    "broadcast": lambda y, z: ((y * 2 + 1)[:, None] * z, y.relu()[..., None].expand(-1, -1, 40)),
    "reductions": lambda y, z: (softmax(y, -1), layer_norm(y, y.shape[-1:]), y.sum(0)),
    "a product": lambda y, z: linear(y.tanh(), z),
    "the other way round": lambda y, z: y.t().relu(),
}


@pytest.mark.parametrize("follow", MORE_FOLLOWERS.values(), ids=MORE_FOLLOWERS)
@pytest.mark.parametrize(
    ("rows", "width", "columns"),
    [(1, 64, 48), (2, 48, 10), (3, 256, 768), (5, 32, 80), (7, 80, 128), (8, 16, 16), (9, 64, 48)],
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_of_few_rows_with_arguments(
    follow: Callable[[torch.Tensor, torch.Tensor], Any],
    rows: int,
    width: int,
    columns: int,
    is_transposed: bool,
) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, z: torch.Tensor) -> Any:
        return follow(x @ (w.t() if is_transposed else w), z)

    shape = (columns, width) if is_transposed else (width, columns)
    args = torch.randn(rows, width), torch.randn(shape), torch.randn(5, columns)
    compiled = torch.compile(function, backend="npu_iree", options={"fallback": "error"})
    torch.testing.assert_close(compiled(*args), function(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 7, 8, 257])
def test_products_with_vectors_that_follow_one_another(rows: int) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return linear(silu(linear(x.relu(), w)) * linear(x + 1, w), v)

    args = torch.randn(1, 48), torch.randn(rows, 48), torch.randn(40, rows)
    compiled = torch.compile(function, backend="npu_iree", options={"fallback": "error"})
    torch.testing.assert_close(compiled(*args), function(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("heads", "rows", "keys", "width"),
    [
        (1, 1, 512, 64),
        (3, 1, 77, 80),  # columns that no tile divides
        (3, 2, 500, 128),
        (1, 2, 13, 16),
        (3, 3, 60, 48),
        (2, 4, 256, 32),
        (3, 4, 60, 20),  # no whole cache lines
        (2, 5, 64, 64),  # too many rows
        (3, 2, 1, 32),
        (3, 1, 2, 32),
        (1, 2, 6, 8192),
        (4, 1, 64, 1),
    ],
)
def test_attention_of_few_rows(heads: int, rows: int, keys: int, width: int) -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: int) -> torch.Tensor:
        scores = torch.bmm(q, k.mT) * 0.125
        scores = torch.where(torch.arange(keys) < seen, scores, -torch.inf)
        return torch.bmm(softmax(scores, -1), v).relu()

    shape = heads, keys, width
    args = torch.randn(heads, rows, width), torch.randn(shape), torch.randn(shape), keys // 2 + 1
    compiled = torch.compile(function, backend="npu_iree", options={"fallback": "error"})
    torch.testing.assert_close(compiled(*args), function(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_what_makes_and_what_follows_products_of_few_rows(rows: int, is_transposed: bool) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        factor = gelu(w + 1)[:, 16:48]
        y = torch.bmm(silu(x), factor.mT if is_transposed else factor)
        return y + 1, y.transpose(0, 1) * 2, y.sum(0), layer_norm(y, y.shape[-1:])

    args = torch.randn(3, rows, 32), torch.randn(3, 64, 32)
    compiled = torch.compile(function, backend="npu_iree", options={"fallback": "error"})
    for actual, expected in zip(compiled(*args), function(*args), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_infinities_and_nans_in_products_of_few_rows(is_transposed: bool) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, w.mT if is_transposed else w)

    x, w = torch.randn(3, 2, 32), torch.randn(3, 32, 32)
    x[0, 0, 3], w[1, 2, 5], x[2, 1, 4], w[2, 4, 4] = torch.inf, torch.nan, 0.0, -torch.inf
    compiled = torch.compile(function, backend="npu_iree", options={"fallback": "error"})
    torch.testing.assert_close(compiled(x, w), function(x, w), equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, w: torch.bmm(s.expand(3, 2, 32), w),
        lambda s, w: torch.bmm(w[:, :2], s.expand(3, 32, 32)),
        lambda s, w: torch.bmm(w[:, :1], w[:, :, :16].mT.contiguous().mT),
        lambda s, w: torch.mv(w[0], s.expand(32)),
        lambda s, w: torch.bmm(w[:, 0:2], w.mT) @ w,
        lambda s, w: torch.baddbmm(w[:, 2:4], w[:, :2], w.mT),
    ],
)
def test_factors_of_few_rows_in_any_form(function: Callable[..., torch.Tensor]) -> None:
    args = torch.randn(1), torch.randn(3, 32, 32)
    compiled = torch.compile(function, backend="npu_iree", options={"fallback": "error"})
    torch.testing.assert_close(compiled(*args), function(*args), rtol=1e-4, atol=1e-4)

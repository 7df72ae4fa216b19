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


def check(every: Callable[..., dict[str, Any]], *args: Any, equal_nan: bool = False) -> None:
    """Compare results with eager's; each has arguments of its own, and so its own programs."""
    found = torch.compile(every, backend="npu_iree", options={"fallback": "error"})(*args)
    for name, expected in every(*args).items():
        torch.testing.assert_close(
            found[name],
            expected,
            rtol=1e-4,
            atol=1e-4,
            equal_nan=equal_nan,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize(("width", "rows"), [(64, 48), (32, 10)])  # whole groups of rows, and not
def test_what_follows_a_product_with_a_vector(width: int, rows: int) -> None:
    def every(given: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
        return {name: FOLLOWERS[name](linear(x, w), z) for name, (x, w, z) in given.items()}

    shapes = (1, width), (rows, width), (rows, 6)
    check(every, {name: [torch.randn(shape) for shape in shapes] for name in FOLLOWERS})


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


@pytest.mark.parametrize(
    ("rows", "width", "columns"),
    [(1, 64, 48), (2, 48, 10), (3, 256, 768), (5, 32, 80), (7, 80, 128), (8, 16, 16), (9, 64, 48)],
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_of_few_rows_with_arguments(
    rows: int, width: int, columns: int, is_transposed: bool
) -> None:
    def every(given: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
        return {
            name: MORE_FOLLOWERS[name](x @ (w.t() if is_transposed else w), z)
            for name, (x, w, z) in given.items()
        }

    weight = (columns, width) if is_transposed else (width, columns)
    shapes = (rows, width), weight, (5, columns)
    check(every, {name: [torch.randn(shape) for shape in shapes] for name in MORE_FOLLOWERS})


def test_products_with_vectors_that_follow_one_another() -> None:
    def every(*given: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            f"{len(w)} rows": linear(silu(linear(x.relu(), w)) * linear(x + 1, w), v)
            for x, w, v in given
        }

    sizes = [((1, 48), (rows, 48), (40, rows)) for rows in (1, 7, 8, 257)]
    check(every, *([torch.randn(shape) for shape in shapes] for shapes in sizes))


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


@pytest.mark.parametrize("rows", [1, 2])
def test_what_makes_and_what_follows_products_of_few_rows(rows: int) -> None:
    def made(x: torch.Tensor, w: torch.Tensor, is_transposed: bool) -> tuple[torch.Tensor, ...]:
        factor = gelu(w + 1)[:, 16:48]
        y = torch.bmm(silu(x), factor.mT if is_transposed else factor)
        return y + 1, y.transpose(0, 1) * 2, y.sum(0), layer_norm(y, y.shape[-1:])

    def every(*given: list[torch.Tensor]) -> dict[str, tuple[torch.Tensor, ...]]:
        return {f"transposed: {bool(i)}": made(x, w, bool(i)) for i, (x, w) in enumerate(given)}

    check(every, *([torch.randn(3, rows, 32), torch.randn(3, 64, 32)] for _ in range(2)))


def test_infinities_and_nans_in_products_of_few_rows() -> None:
    def every(*given: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        (x, w), (y, v) = given
        return {"as it is": torch.bmm(x, w), "transposed": torch.bmm(y, v.mT)}

    x, w = torch.randn(3, 2, 32), torch.randn(3, 32, 32)
    x[0, 0, 3], w[1, 2, 5], x[2, 1, 4], w[2, 4, 4] = torch.inf, torch.nan, 0.0, -torch.inf
    check(every, [x, w], [x.clone(), w.clone()], equal_nan=True)


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "one number as rows": lambda s, w: torch.bmm(s.expand(3, 2, 32), w),
    "one number as matrices": lambda s, w: torch.bmm(w[:, :2], s.expand(3, 32, 32)),
    "columns in memory": lambda s, w: torch.bmm(w[:, :1], w[:, :, :16].mT.contiguous().mT),
    "one number as a vector": lambda s, w: torch.mv(w[0], s.expand(32)),
    "a product": lambda s, w: torch.bmm(w[:, 0:2], w.mT) @ w,
    "added": lambda s, w: torch.baddbmm(w[:, 2:4], w[:, :2], w.mT),
}


def test_factors_of_few_rows_in_any_form() -> None:
    def every(given: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: FORMS[name](s, w) for name, (s, w) in given.items()}

    check(every, {name: [torch.randn(1), torch.randn(3, 32, 32)] for name in FORMS})

"""Products with a vector, and what is computed of them in the same device program."""

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


@pytest.mark.parametrize("rows", [1, 7, 8, 257])
def test_products_with_vectors_that_follow_one_another(rows: int) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return linear(silu(linear(x.relu(), w)) * linear(x + 1, w), v)

    args = torch.randn(1, 48), torch.randn(rows, 48), torch.randn(40, rows)
    compiled = torch.compile(function, backend="npu_iree", options={"fallback": "error"})
    torch.testing.assert_close(compiled(*args), function(*args), rtol=1e-4, atol=1e-4)

"""Softmax of rows of all lengths, of what is computed, and with what is computed of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import layer_norm

Function = Callable[[torch.Tensor], torch.Tensor]
# Whole rows at a time, lanes of 16 and of other numbers, none that fit; and more than rows.
SHAPES = [(9, 1), (3, 7), (5, 64), (2, 53), (2, 3, 128), (4, 144), (2, 1500), (6, 197), (3, 257)]
SHAPES += [(1, 1024), (2, 2, 2, 160), (2, 4096), (2, 4112), (130, 48), (1, 8, 31)]
BEFORE: dict[str, Function] = {
    "loaded": lambda x: x,
    "scaled": lambda x: x * 0.3 + x[0],
    "transposed": lambda x: x.t().contiguous().t() + 1,
    "gathered": lambda x: x[torch.arange(8).flip(0)],
    "outer product": lambda x: x[:, :1] * x[0],
    "product": lambda x: x @ x.t() @ x,
    "normalized": lambda x: layer_norm(x, x.shape[-1:]),
    "softmax": lambda x: torch.softmax(x, -1),
    "masked": lambda x: x.masked_fill(torch.ones(x.shape, dtype=torch.bool).triu(1), -math.inf),
}
AFTER: dict[str, Function] = {
    "sum": lambda y: y.sum(0),
    "logarithm": lambda y: torch.log(y) * 2,
    "transposed": lambda y: y.t().contiguous(),
    "product": lambda y: y @ y.t(),
    "joined": lambda y: torch.cat([y, y * 2]),
    "half": lambda y: y.half(),
}


def check(function: Callable[..., object], *args: torch.Tensor) -> None:
    compiled = torch.compile(function, backend="npu_iree", options={"fallback": "error"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), function(*args), equal_nan=True)


def test_rows_of_all_lengths() -> None:
    def function(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [torch.softmax(x, -1) for x in xs]

    check(function, *(torch.randn(shape) * 3 for shape in SHAPES))


@pytest.mark.parametrize("width", [90, pytest.param(96, marks=pytest.mark.sweep)])
def test_what_is_computed_before_and_after(width: int) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        before = [torch.softmax(f(x), -1) for f in BEFORE.values()]
        return before + [f(torch.softmax(x + i, -1)) for i, f in enumerate(AFTER.values())]

    check(function, torch.randn(8, width))


@pytest.mark.parametrize("width", [16, 1504])
def test_special_values(width: int) -> None:
    """A row with NaN, with infinities of each sign, of nothing but -inf, and of great numbers."""
    x = torch.randn(7, width)
    x[0, 3] = math.nan
    x[1, 2] = math.inf
    x[2, 1] = -math.inf
    x[3] = -math.inf
    x[4] *= 1e30
    x[5] = torch.finfo(torch.float32).min
    check(lambda x: torch.softmax(x, -1), x)

"""Rows of any length, order, dtype and dimension, sorted as eager sorts them, and their firsts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("shared_cache")

LENGTHS = (2, 9, 100, 1000)
SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0)


def rows(length: int, dtype: torch.dtype) -> torch.Tensor:
    """Two rows with many equal elements; of floats, with NaNs, infinities and both zeros."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randint(-20, 20, (2, length), generator=generator)
    if not dtype.is_floating_point:
        return x.to(dtype)
    places = torch.randint(0, length, (len(SPECIAL),), generator=generator)
    y = x.to(dtype)
    y[:, places] = torch.tensor(SPECIAL, dtype=dtype)
    return y


def sorts(*tensors: torch.Tensor) -> list[Any]:
    """Sort along both dimensions, up and down, with places and without."""
    found: list[Any] = []
    for x in tensors:
        down = x.mT.contiguous()
        found += [x.sort(dim=1, stable=True), down.sort(dim=0, descending=True, stable=True)]
        found += [x.sort(1, descending=True)[0]]
    return found


def firsts(*tensors: torch.Tensor) -> list[Any]:
    """Take the largest and the smallest: few, more, or all there are."""
    found: list[Any] = []
    for x in tensors:
        for count in (min(5, x.shape[1]), min(40, x.shape[1])):
            largest, places = x.topk(count)
            found += [largest, x.gather(1, places)]
        found += [x.topk(2, 1, largest=False)[0], x.mT.contiguous().topk(2, 0)[0]]
    return found


@pytest.mark.parametrize("function", [sorts, firsts], ids=["sorts", "firsts"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8], ids=str
)
def test_rows_are_sorted_as_in_eager(
    function: Any, dtype: torch.dtype, counts: Counter[str]
) -> None:
    tensors = [rows(length, dtype) for length in LENGTHS]
    compiled = torch.compile(function, backend="npu_iree", dynamic=False)
    assert_equal(compiled(*tensors), function(*tensors))
    assert counts["host_ops"] == 0
    assert counts["refused_flags"] == 0


def test_rows_of_a_length_that_is_not_known_are_sorted(counts: Counter[str]) -> None:
    """Also those for which there is no room on the stack."""

    def function(x: torch.Tensor) -> list[Any]:
        return [*sorts(x), x.topk(3)[0]]

    compiled = torch.compile(function, backend="npu_iree", dynamic=True)
    for length in (9, 600, 1500):
        x = rows(length, torch.float32)
        assert_equal(compiled(x), function(x))
    assert counts["graphs"] == 1


def test_what_is_read_whole_beside_its_firsts_is_sorted_whole() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = x.sort(dim=1, stable=True)
        return values[:, :3] + 1, places[:, :2], values[:, 1:4] * 2, values

    x = rows(100, torch.float32)
    assert_equal(torch.compile(function, backend="npu_iree")(x), function(x))


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)

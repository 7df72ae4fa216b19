"""Powers of zero, of negative and infinite numbers and of NaN are PyTorch's, signs of zero too."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")

INF, NAN = float("inf"), float("nan")
NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 2.5, -2.5, INF, -INF, NAN)


def results(x: torch.Tensor) -> list[torch.Tensor]:
    """Raise each value to each, and each number, in the ways in which a program can say so."""
    pairs = torch.pow(x[:, None], x[None, :])
    return [pairs, *(n**x for n in NUMBERS), *(x**n for n in NUMBERS)]


def check(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert_same(found, expected)
    for one, other in zip(found, expected, strict=True):
        zeros = other == 0
        assert torch.equal(torch.signbit(one[zeros]), torch.signbit(other[zeros]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_number_to_the_power_of_each(dtype: torch.dtype) -> None:
    x = torch.tensor(NUMBERS, dtype=dtype)
    check(torch.compile(results, backend="npu_iree")(x), results(x))


def test_numbers_and_whole_exponents_of_another_dtype() -> None:
    def powers(x: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
        return [x[:, None] ** n, (-2.0) ** n, 0.0**n, 2.5**n, torch.float_power(x[:, None], n)]

    x, n = torch.tensor(NUMBERS), torch.arange(-3, 4)
    check(torch.compile(powers, backend="npu_iree")(x, n), powers(x, n))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_to_the_power_of_a_number_run_on_the_device(
    dtype: torch.dtype, counts: Counter[str]
) -> None:
    def powers(x: torch.Tensor) -> list[torch.Tensor]:
        return [x**n for n in (0, 1, 2, 3, 7, 100, True)]

    x = torch.tensor([0, 1, -1, 2, -3, 10, torch.iinfo(dtype).max], dtype=dtype)
    assert_same(torch.compile(powers, backend="npu_iree")(x), powers(x))
    assert (counts["regions"], counts["host_ops"]) == (1, 0)

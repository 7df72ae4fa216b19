"""Values that the program holds beside numbers: compilers fold them, and wrongly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")

Function: TypeAlias = Callable[[torch.Tensor], list[torch.Tensor]]
INF, NAN = float("inf"), float("nan")
COMPARISONS = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)
FLOATS = (0.0, 1.0, 0.5, -1.0, 2.0, INF, -INF, NAN)
WHOLE = (0, 1, 0.5, -1, 2)
VALUES: dict[torch.dtype, tuple[tuple[float, ...], tuple[float, ...]]] = {
    torch.float32: ((0.0, INF, NAN), FLOATS),
    torch.float64: ((1.0,), FLOATS),
    torch.bfloat16: ((1.0,), FLOATS),
    torch.int64: ((0, 2, 300), WHOLE),
    torch.int32: ((1,), WHOLE),
    torch.uint8: ((1,), (0, 1, 0.5, 2)),
    torch.bool: ((0, 1), WHOLE),
}


INPUT = torch.tensor([1.0, 2.0, 3.0])


def compiled(function: Function, dynamic: bool = False) -> list[torch.Tensor]:
    return torch.compile(function, backend="npu_iree", dynamic=dynamic)(INPUT)


def compare(x: torch.Tensor, numbers: tuple[float, ...]) -> list[torch.Tensor]:
    """Compare in each way with each number."""
    return [function(x, number) for function in COMPARISONS for number in numbers]


@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_of_a_filled_tensor(dtype: torch.dtype) -> None:
    values, numbers = VALUES[dtype]

    def filled(y: torch.Tensor) -> list[torch.Tensor]:
        found = [y + 1]
        for value in values:
            found += compare(torch.full((3,), value, dtype=dtype), numbers)
            found += compare(torch.full((), value, dtype=dtype), numbers)
        return found

    assert_same(compiled(filled), filled(INPUT))


def test_of_a_literal() -> None:
    def literal(y: torch.Tensor) -> list[torch.Tensor]:
        literals = (torch.tensor([1, 2, 3], dtype=dtype) for dtype in (torch.float32, torch.int64))
        return [y + 1, *(found for x in literals for found in compare(x, (0.5, 2)))]

    assert_same(compiled(literal), literal(INPUT))


def test_of_what_is_computed_of_numbers() -> None:
    def computed(y: torch.Tensor) -> list[torch.Tensor]:
        x = torch.full((3,), -2.0)
        found = [y + 1]
        for value in (x.abs(), x.reciprocal(), -x, x * 0.5, torch.where(x < 0, 1.0, x)):
            found += compare(value, (1.0, -1.0, 2.0, NAN))
        return found

    assert_same(compiled(computed), computed(INPUT))


def test_of_a_tensor_as_long_as_an_input_of_any_length() -> None:
    def filled(y: torch.Tensor) -> list[torch.Tensor]:
        x = torch.full((y.shape[0],), 2.0)
        return [y + 1, *compare(x, (0.0, 2.0, INF)), *compare(torch.zeros_like(y), (0.0, NAN))]

    assert_same(compiled(filled, dynamic=True), filled(INPUT))


@pytest.mark.parametrize("dynamic", [False, True])
def test_negative_numbers_keep_their_sign(dynamic: bool) -> None:
    def negative(y: torch.Tensor) -> list[torch.Tensor]:
        one, mask = torch.ones(3), torch.triu(torch.ones(3, 3) * -10000, 1)
        kinds = (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8)
        others = [torch.ones(3, dtype=dtype) for dtype in kinds]
        found = [y + one * -2, y + mask, torch.ones_like(y) * -1, y.new_full((3,), 0.5) * -3]
        found += [function(x, -2) for x in others[:4] for function in (torch.add, torch.mul)]
        found += [function(one, -2) for function in (torch.add, torch.sub, torch.rsub, torch.div)]
        found += [function(one, one, alpha=-2) for function in (torch.add, torch.sub, torch.rsub)]
        found += [torch.addcmul(one, one, one, value=-2), torch.addmm(mask, mask, mask, alpha=-2)]
        found += [torch.where(y > 1, torch.ones(()) * -5, y), (one * -2).to(torch.int64)]
        found += [torch.zeros(3).add_(-1), others[4].float() * -2, y + torch.tensor(2.0) * -2]
        return found

    assert_same(compiled(negative, dynamic), negative(INPUT))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_numbers_that_no_float_is(dtype: torch.dtype) -> None:
    """Eager rounds 0.1 to the dtype that it compares in: the float32 next to it is equal to it."""
    numbers = (0.1, 0.2, 1 / 3, 16777217)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        doubles = [torch.tensor(number, dtype=torch.float64) for number in numbers]
        return [op(x, n) for op in COMPARISONS for n in (*numbers, *doubles)]

    x = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    assert_same(torch.compile(function, backend="npu_iree")(x), function(x))


def test_integers_and_numbers_with_a_fraction(counts: Counter[str]) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        found = [op(x, number) for op in COMPARISONS for number in (16777216.5, 2.5, 3)]
        found += [torch.clamp(x, *bounds) for bounds in ((2.5, 9), (torch.tensor(2.5),))]
        return [*found, torch.clamp_max(x.int(), 2.5), torch.clamp(x, max=torch.full((5,), 2.5))]

    x = torch.tensor([2, 3, 16777216, 16777217, 16777218])
    assert_same(torch.compile(function, backend="npu_iree")(x), function(x))
    assert counts["host_ops"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_of_a_copy_of_itself_where_there_is_no_number(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        copies = x.clone(), x.detach(), x[:], x.to(dtype, copy=True), x.expand(2, 2), +x
        equal = [x == copy for copy in copies]
        return [*equal, torch.isclose(x, x.clone()), torch.where(x.clone() == x, x, 0)]

    x = torch.tensor([[1, NAN], [INF, -0.0]], dtype=dtype)
    compiled_function = torch.compile(function, backend="npu_iree")
    assert_same(compiled_function(x), function(x))

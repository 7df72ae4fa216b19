"""What a call overwrites is read by others as it was: slices of itself, other sorts, the caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")

Function = Callable[[torch.Tensor], Any]
X = torch.arange(18.0).view(3, 6)
PLACES = torch.tensor([1, 2])


def shift_columns(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    x[:, 1:] = x[:, :-1].clone()
    return x


def shift_rows(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    x[1:] = x[:-1].clone()
    return x


def shift_turned(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    x[:, 1:] = x[:, :-1].t().contiguous().t()
    return x


def write_slices(x: torch.Tensor) -> torch.Tensor:
    x[:2] = x[2] + 1
    x[1:].mul_(2)
    x[0] = 7
    return x.sum()


OVERLAPS: dict[str, Function] = {
    "columns": shift_columns,
    "rows": shift_rows,
    "turned": shift_turned,
    "an argument": lambda x: x.slice_scatter(x[:2], 0, 1, 3),
    "copied by index": lambda x: (x + 1).index_copy(0, PLACES, (x + 1)[:2]),
    "put": lambda x: (y := x + 1).index_put((PLACES,), y[:2]),
    "added": lambda x: (y := x + 1).index_add(0, PLACES, y[:2]),
    "reshaped": lambda x: (y := x + 1).index_copy(0, PLACES, y[:2].reshape(4, 3).reshape(2, 6)),
    "scattered": lambda x: (y := x + 1).scatter(0, torch.tensor([[1, 2, 0, 1, 2, 0]]), y[1:]),
}
SORTS: dict[str, Function] = {
    "of one shape": lambda x: (x.argsort(), (-x).argsort(), x.sin().sort()),
    "of two dtypes": lambda x: (x.sort(), x.double().neg().sort()),
    "the largest and the smallest": lambda x: (x.topk(2), (-x).topk(3), x.topk(2, largest=False)),
    "and what was there": lambda x: (y := x.index_select(1, PLACES)).sort(0)[0] + y.flip(0),
    "filled": lambda x: [torch.zeros(4, 6).index_put((PLACES,), x[i : i + 2]) for i in (0, 1)],
    "of what others give": lambda x: (x.topk(4)[0].topk(2), x.exp().cumsum(-1)[:, 2:].sort()),
    "of one element": lambda x: [(x[0, i : i + 1] > 0).cumsum(0) for i in (0, 1)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("name", OVERLAPS)
def test_a_slice_is_put_into_its_own_tensor(
    name: str, dtype: torch.dtype, counts: Counter[str]
) -> None:
    x = X.to(dtype)
    function = OVERLAPS[name]
    assert_same(torch.compile(function, backend="npu_iree")(x), function(x))
    assert counts["host_ops"] == 0


@pytest.mark.parametrize("name", SORTS)
def test_several_sorts_and_fills(name: str, counts: Counter[str]) -> None:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    function = SORTS[name]
    assert_same(torch.compile(function, backend="npu_iree")(x), function(x))
    assert (counts["refused_flags"], counts["regions"]) == (0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
@pytest.mark.parametrize("width", [3, 256])
def test_contiguous_slices_of_an_argument_are_written_in_place(
    width: int, dtype: torch.dtype
) -> None:
    start = torch.arange(3 * width).view(3, width).to(dtype)
    expected, x = start.clone(), start.clone()
    result = write_slices(expected)
    compiled = torch.compile(write_slices, backend="npu_iree")
    for _ in range(3):  # the third call finds the memory where it was
        x.copy_(start)
        assert_same(compiled(x), result)
        assert_same(x, expected)


def test_nans_are_the_largest() -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[nan, 2, -1, 3, nan, inf, -inf, 2], [1, nan, nan, 0, inf, nan, 0, nan]])

    def order(x: torch.Tensor) -> list[object]:
        ways = [x.sort(descending=d, stable=True, dim=-1) for d in (False, True)]
        some = [x.topk(3)[0], x.topk(3, largest=False)[0], x.half().sort()[0], x.msort()]
        return [*ways, *some, torch.quantile(x, 0.3, 1), torch.nanquantile(x, 0.3, 1)]

    assert_same(torch.compile(order, backend="npu_iree")(x), order(x))


def test_uint8_above_127_is_not_negative() -> None:
    def read(u: torch.Tensor) -> list[torch.Tensor]:
        some = [u / 255, u - 127.5, u > 150, u.topk(2)[0], u.fmod(7), u.prod(), u.clamp(130, 250)]
        return [*some, torch.cat([u, u.float()]), torch.where(u > 3, u, u.long()), u + u, u.float()]

    u = torch.tensor([255, 200, 128, 7], dtype=torch.uint8)
    assert_same(torch.compile(read, backend="npu_iree")(u), read(u))


def test_what_is_written_into_is_read_beside_what_came_of_it() -> None:
    def read(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        old = x.exp()
        new = old.slice_scatter(y[:, :, 1:3], 2, 1, 3)
        chosen = new.gather(1, (y.abs() * 7).long().remainder(4))
        return old, chosen - old.amax(-2, keepdim=True)

    x, y = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    assert_same(torch.compile(read, backend="npu_iree")(x, y), read(x, y))


def test_what_is_read_along_its_diagonal_is_whole() -> None:
    def read(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        doubled, centred = x * 2, x - x.sum(-1, keepdim=True)
        new = doubled.diagonal_scatter(doubled.diagonal() + y[0])
        return doubled, new, centred + centred.diagonal()

    x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    assert_same(torch.compile(read, backend="npu_iree")(x, y), read(x, y))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors_are_copied_before_they_are_written_into(dtype: torch.dtype) -> None:
    def put(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [t.slice_scatter(y, 1, i, i + 4) for t in (x, torch.zeros_like(x)) for i in (0, 2)]

    x, y = X.to(dtype) * (1 + 2j), torch.ones(3, 4, dtype=dtype) * 1j
    before = x.clone()
    assert_same(torch.compile(put, backend="npu_iree", dynamic=False)(x, y), put(x, y))
    assert_same(x, before)


@pytest.mark.parametrize("of", [torch.conj, lambda z: z.conj().imag], ids=["conjugate", "negative"])
def test_what_has_its_sign_turned_lazily_is_written_to(of: Function) -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return y * 2

    found, expected = torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([1 + 2j, 3 - 1j])
    x, wanted = of(found), of(expected)
    y = torch.ones_like(x)
    assert_same(torch.compile(add, backend="npu_iree")(x, y), add(wanted, y))
    assert_same(found, expected)

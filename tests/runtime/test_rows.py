"""What is computed row by row: as eager has it, whatever the rows, their lengths and dtypes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm, normalize

from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")

# Of a matrix [R, C], another, a number for each row [R, 1] and for each column [C].
Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]
OF_NUMBERS: dict[str, Function] = {
    "sum": lambda x, y, row, column: (x * row + y).sum(-1),
    "least and largest": lambda x, y, row, column: (x.amax(-1), (x + y).amin(-1)),
    "centered": lambda x, y, row, column: (x - x.amax(-1, keepdim=True)) * column,
    "what is reduced": lambda x, y, row, column: (z := x + y, z.sum(-1), z * z.amax(-1, True)),
    "product": lambda x, y, row, column: (x.clamp(1, 2) * row.clamp(1, 1)).prod(-1),
    "of columns": lambda x, y, row, column: (column + row).amax(-1) + x.sum(-1),
    "both dimensions": lambda x, y, row, column: x.amax(-1, True) + (x + y).amin(0),
    "several": lambda x, y, row, column: x.sum(-1, True) + (x * y.amax(-1, True)).sum(-1, True),
}
OF_FLOATS: dict[str, Function] = {
    "softmax": lambda x, y, row, column: torch.softmax(x * 0.3 + column, -1) * y,
    "log_softmax": lambda x, y, row, column: torch.log_softmax(x + row, -1),
    "softmax of softmax": lambda x, y, row, column: torch.softmax(torch.softmax(x, -1) + y, -1),
    "statistics": lambda x, y, row, column: torch.var_mean(x - y, -1, correction=0),
    "layer_norm": lambda x, y, row, column: layer_norm(x + y, column.shape, column) + (x + y),
    "rms_norm": lambda x, y, row, column: (z := x * row, z * (z * z).mean(-1, True).rsqrt() * y),
    "unit": lambda x, y, row, column: normalize(x, dim=-1) + row,
    "logsumexp": lambda x, y, row, column: torch.logsumexp(x, -1) * 2,
    "kept": lambda x, y, row, column: (e := (x * y).sigmoid()) * e.sum(-1, True) + e.amax(-1, True),
}
SHAPES = [(33, 17), (5, 1), (3, 7), (4, 8), (2, 64), (16, 16), (3, 255), (2, 257), (1, 1000)]
SHAPES += [(7, 4100), (64, 5000)]
REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": torch.softmax,
    "amax": torch.amax,
    "sum": torch.sum,
    "amin": torch.amin,
    "mean": torch.mean,
}
OF_HALVES = ("sum", "least and largest", "softmax", "rms_norm", "logsumexp")


def matrices(rows: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)  # of which no long sum is nearly zero
    shapes = ((rows, columns), (rows, columns), (rows, 1), (columns,))
    return [(torch.randn(shape, generator=generator) * 3).to(dtype) for shape in shapes]


def check(function: Callable[..., Any], *args: torch.Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="npu_iree", options={"fallback": "error"})
    with torch.no_grad():
        assert_same(compiled(*args), function(*args))


def check_all(functions: dict[str, Function], *matrices: torch.Tensor) -> None:
    check(lambda *args: {name: function(*args) for name, function in functions.items()}, *matrices)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_of_floats(dtype: torch.dtype, shape: tuple[int, int], counts: Counter[str]) -> None:
    check_all({**OF_NUMBERS, **OF_FLOATS}, *matrices(*shape, dtype))
    assert counts["refused_flags"] == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_integers(shape: tuple[int, int], dtype: torch.dtype, counts: Counter[str]) -> None:
    check_all(OF_NUMBERS, *matrices(*shape, dtype))
    assert counts["refused_flags"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("unknown", [(0, 1), (0,), (1,)], ids=str)
def test_rows_of_unknown_sizes(
    unknown: tuple[int, ...], dtype: torch.dtype, counts: Counter[str]
) -> None:
    """One compile for all of them."""
    functions = {**OF_NUMBERS, **(OF_FLOATS if dtype.is_floating_point else {})}

    def all_of_them(*args: torch.Tensor) -> list[Any]:
        return [function(*args) for function in functions.values()]

    options = {"fallback": "error"}
    compiled = torch.compile(all_of_them, backend="npu_iree", options=options, dynamic=True)
    for sizes in [(33, 17), (5, 3), (70, 64), (2, 4100), (300, 257), (9, 40)]:
        shape = [size if d in unknown else 24 for d, size in enumerate(sizes)]
        x, y, row, column = matrices(*shape, dtype)
        for known in {0, 1} - set(unknown):
            for tensor in (x, y, (row, column)[known]):
                torch._dynamo.mark_static(tensor, 0 if tensor is column else known)
        with torch.no_grad():
            assert_same(compiled(x, y, row, column), all_of_them(x, y, row, column))
    assert counts["graphs"] == 1
    assert counts["refused_flags"] == 0


@pytest.mark.parametrize("unknown", [(0,), (1,), (0, 1)], ids=str)
def test_unknown_sizes_may_be_one_or_nothing(
    unknown: tuple[int, ...], counts: Counter[str]
) -> None:
    def function(x: torch.Tensor) -> Any:
        return torch.softmax(x * 2, -1), torch.log_softmax(x, -1), x.sum(-1), x * x.mean(-1, True)

    compiled = torch.compile(function, backend="npu_iree")
    for sizes in [(5, 40), (1, 1), (0, 3), (3, 1), (0, 0), (4, 0), (70, 100)]:
        x, *_ = matrices(*(s if d in unknown else 20 for d, s in enumerate(sizes)), torch.float32)
        for dimension in unknown:
            torch._dynamo.decorators.mark_unbacked(x, dimension)
        with torch.no_grad():
            assert_same(compiled(x), function(x))
    assert counts["refused_flags"] == 0


def test_attention_of_any_batch_and_length(counts: Counter[str]) -> None:
    def function(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(-1, -2)) / 8 + mask
        return torch.softmax(scores, -1) @ k

    compiled = torch.compile(function, backend="npu_iree", dynamic=True)
    for batch, length in [(2, 33), (3, 64), (2, 300)]:
        q, k = (torch.randn(batch, 4, length, 64) for _ in range(2))
        mask = torch.where(torch.rand(batch, 1, 1, length) < 0.2, -math.inf, 0.0)
        assert_same(compiled(q, k, mask), function(q, k, mask))
    assert counts["graphs"] == 1
    assert counts["refused_flags"] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [8, 100, 1000])
def test_rows_of_halves(columns: int, dtype: torch.dtype, counts: Counter[str]) -> None:
    """Positive ones, the sums of which keep their digits."""
    functions = {**OF_NUMBERS, **OF_FLOATS}
    positive = (x.abs() / 4 + 0.5 for x in matrices(6, columns, dtype))
    check_all({name: functions[name] for name in OF_HALVES}, *positive)
    assert counts["refused_flags"] == 0


@pytest.mark.parametrize("name", [*OF_NUMBERS, *OF_FLOATS])
def test_each_by_itself(name: str) -> None:
    check({**OF_NUMBERS, **OF_FLOATS}[name], *matrices(24, 197, torch.float32))


def test_special_numbers() -> None:
    """Each reduction has a matrix of its own, beside which it is not computed with others."""

    def function(*matrices: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
        pairs = zip(itertools.product(REDUCTIONS, (13, 300)), matrices, strict=True)
        return {(name, columns): REDUCTIONS[name](x, -1) for (name, columns), x in pairs}

    special = []
    for _, columns in itertools.product(REDUCTIONS, (13, 300)):
        x, *_ = matrices(6, columns, torch.float32)
        x[0, 3], x[1, 2], x[2, 1] = math.nan, math.inf, -math.inf
        x[3], x[4], x[5] = -math.inf, 1e30, 0.0
        special.append(x)
    check(function, *special)


def test_quotients_of_integers(counts: Counter[str]) -> None:
    """Beyond the end of a row there is nothing to divide by."""
    x, y, *_ = matrices(40, 197, torch.int32)

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.div(x, y.abs() + 1, rounding_mode="trunc") + torch.remainder(x, y.abs() + 3)
        return z, z.sum(-1)

    check(function, x, y)
    assert counts["refused_flags"] == counts["compiler_crashes"] == 0


def test_a_row_of_sums_is_no_column() -> None:
    """Of square matrices both have the same shape."""

    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "times a row": torch.softmax(x * x.sum(1)[None], -1),
            "times a column": torch.softmax(y * y.sum(1)[:, None], -1),
            "and sums of a softmax": torch.softmax(z + torch.softmax(z, -1).sum(0), -1),
        }

    check(function, *(matrices(64, 64, torch.float32)[0] + i for i in range(3)))


def test_reductions_of_several_dimensions() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "of groups": torch.nn.functional.group_norm(x, 4),
            "of images": y / y.sum((2, 3), keepdim=True),
            "of pixels": torch.softmax(z.flatten(2), -1).unflatten(2, (6, 5)) * z,
        }

    check(function, *(torch.randn(2, 8, 6, 5) for _ in range(3)))


def test_parts_of_matrices() -> None:
    def function(*x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "columns": torch.softmax(x[0][:, :197], -1),
            "rows": torch.softmax(x[1][:24], -1)[:, :100] * x[1][:24, :100],
            "beside": torch.cat([torch.softmax(x[2], -1), layer_norm(x[4], (64,))], 1),
            "below": torch.cat([torch.softmax(x[3], -1), x[3] * 2]).sum(-1),
        }

    check(function, *(torch.randn(40, 300) for _ in range(4)), torch.randn(40, 64))


def test_what_lies_between_keeps_its_place() -> None:
    """A product reads a row program's result, and the next row program the product's."""
    x, w = torch.randn(40, 64), torch.randn(64, 64)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1)
        z = y @ w
        return torch.softmax(z + y, -1) + y.amax(-1, True)

    check(function, x, w)


def test_gradients_of_rows() -> None:
    x, w = torch.randn(12, 200, requires_grad=True), torch.randn(200, requires_grad=True)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(layer_norm(x, (200,), w), -1) * x).sum()

    compiled = torch.compile(function, backend="npu_iree", options={"fallback": "error"})
    found = torch.autograd.grad(compiled(x, w), (x, w))
    assert_same(found, torch.autograd.grad(function(x, w), (x, w)))


def test_long_chains_before_a_reduction(counts: Counter[str]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(250):
            x = x * 0.5 + y
        return torch.softmax(x, -1)

    check(function, torch.randn(80, 48), torch.randn(80, 48))
    assert counts["refused_flags"] == 0


def test_one_number_for_all() -> None:
    def function(s: torch.Tensor, *x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.softmax(rows * s, -1) + s for rows in x]

    check(function, torch.tensor(2.0), *(torch.randn(rows, 197) for rows in (1, 40)))

"""Products and convolutions by a CPU's matrix unit give float32's results, for whatever numbers.

On a CPU without one, the same products are computed as any others: all of this holds there, too.
"""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

pytestmark = pytest.mark.usefixtures("shared_cache")

# The block of a unit is 32 x 32, 32 deep; panels hold 32 columns.
SHAPES = [
    (32, 192, 32),  # the least that the unit is used for
    (97, 224, 64),  # blocks of 25 rows, and one of 22
    (150, 256, 96),  # blocks of 30
    (128, 5120, 32),  # the deepest
    (600, 192, 64),  # more rows than a work item has
    (96, 208, 32),  # no whole number of steps
    (250, 1500, 64),
    (77, 193, 33),
    (64, 192, 33),  # no whole number of panels
]
ROWS, DEPTH, COLUMNS = 70, 192, 64
multiply = torch.compile(torch.mm, backend="npu_iree", options={"fallback": "error"})


def between_one_and_two(*shape: int, random: torch.Generator | None = None) -> torch.Tensor:
    """Numbers of that magnitude, of both signs: devices may take the smallest there are for 0."""
    signs = torch.randint(2, shape, generator=random) * 2 - 1
    return (1 + torch.rand(*shape, generator=random)) * signs


def assert_as_precise_as_float32(actual: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    """To a few units in the last place of the sum of the magnitudes, or where float32 ends."""
    exact = x.double() @ w.double()
    magnitude = x.double().abs() @ w.double().abs()
    error = (actual.double() - exact).abs()
    excess = error - (magnitude * 2**-21 + 2**-85)
    assert excess.max() <= 0, f"{error.max()} where {magnitude.max()} is added up"


@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
def test_products_of_all_shapes_are_precise(rows: int, depth: int, columns: int) -> None:
    x, w = torch.randn(rows, depth), torch.randn(depth, columns)
    assert_as_precise_as_float32(multiply(x, w), x, w)


@pytest.mark.parametrize("columns", [543, 545])
def test_weights_whose_columns_leave_one_over_are_multiplied_precisely(columns: int) -> None:
    """The last panel is padded; what it has over is not in the result, even where it is NaN."""
    linear = torch.nn.Linear(224, columns).requires_grad_(False)
    compiled = torch.compile(linear, backend="npu_iree", options={"fallback": "error"})
    x = torch.randn(70, 224)
    assert_as_precise_as_float32(compiled(x) - linear.bias, x, linear.weight.T)
    x[3, 5] = torch.inf
    torch.testing.assert_close(compiled(x), linear(x), equal_nan=True)


def test_stacked_products_are_precise() -> None:
    x, w = torch.randn(3, 96, 256), torch.randn(3, 256, 64)
    compiled = torch.compile(torch.bmm, backend="npu_iree", options={"fallback": "error"})
    for actual, a, b in zip(compiled(x, w), x, w, strict=True):
        assert_as_precise_as_float32(actual, a, b)


# An image [N, C, H, W], the features, and what the window is; 3x3 and padded by 1, if nothing else.
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "of whole rows": ((1, 64, 17, 28), 64, {}),
    "of half rows": ((2, 32, 9, 56), 32, {}),
    "with strides": ((1, 32, 56, 28), 96, {"stride": 2}),
    "of one row": ((1, 96, 20, 26), 32, {"kernel": (1, 3), "padding": (0, 1)}),
    "of one column": ((1, 96, 20, 26), 32, {"kernel": (3, 1), "padding": (1, 0)}),
    "of a wide window": ((1, 32, 18, 34), 32, {"kernel": 5, "padding": (1, 0)}),
    "with rows apart": ((1, 64, 20, 28), 32, {"dilation": (2, 1), "padding": (2, 1)}),
    "with columns apart": ((1, 64, 20, 28), 32, {"dilation": (1, 2), "padding": (1, 2)}),
    "of channels that 32 does not divide": ((1, 48, 20, 28), 32, {}),
    "of rows that nothing divides": ((1, 64, 20, 37), 32, {}),
}


def convolution(case: str) -> tuple[torch.nn.Module, Any, torch.Tensor]:
    """Give a convolution, the same compiled, and an image."""
    sizes, features, window = CONVOLUTIONS[case]
    window = {"padding": 1, **window}
    layer = torch.nn.Conv2d(sizes[1], features, window.pop("kernel", 3), **window)
    model = layer.requires_grad_(False)
    compiled = torch.compile(model, backend="npu_iree", options={"fallback": "error"})
    return model, compiled, torch.randn(sizes)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_of_all_shapes_are_precise(case: str) -> None:
    model, compiled, x = convolution(case)
    actual = compiled(x).double()
    exact = model.double()(x.double())
    for parameter in model.parameters():
        parameter.abs_()
    magnitude = model(x.double().abs())
    assert ((actual - exact).abs() <= magnitude * 2**-21).all()


@pytest.mark.parametrize("special", [math.inf, math.nan, 3.4e38, 1e-40])
@pytest.mark.parametrize("place", [(0, 0, 0, 0), (0, 63, 16, 27), (0, 5, 8, 13)])
def test_special_numbers_stay_where_they_are_in_images(
    special: float, place: tuple[int, ...]
) -> None:
    model, compiled, x = convolution("of whole rows")
    x[place] = special
    torch.testing.assert_close(compiled(x), model(x), equal_nan=True, rtol=1e-5, atol=1e-4)


def test_numbers_that_only_three_parts_hold_are_multiplied_in_full() -> None:
    x, w = torch.zeros(ROWS, DEPTH), torch.zeros(DEPTH, COLUMNS)
    x[:, 0], w[0] = 1 + 2.0**-23, 1.0
    x[:, 1], w[1] = -1.0, 1.0
    assert torch.equal(multiply(x, w), torch.full((ROWS, COLUMNS), 2.0**-23))


@pytest.mark.parametrize("factor", ["x", "w"])
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan, 3.4e38, 1e-40])
@pytest.mark.parametrize("place", [(0, 0), (65, 33)])
def test_special_numbers_stay_where_they_are(
    factor: str, special: float, place: tuple[int, int]
) -> None:
    x, w = torch.randn(ROWS, DEPTH), torch.randn(DEPTH, COLUMNS)
    (x if factor == "x" else w)[place] = special
    torch.testing.assert_close(multiply(x, w), x @ w, equal_nan=True, rtol=1e-5, atol=1e-4)


def test_an_infinity_times_zero_is_no_number_and_elsewhere_an_infinity() -> None:
    x, w = torch.ones(ROWS, DEPTH), torch.ones(DEPTH, COLUMNS)
    x[40, 7], w[7, 3] = math.inf, 0.0
    result = multiply(x, w)
    assert result[40, 3].isnan()
    assert result[40].isinf().sum() == COLUMNS - 1
    assert result.isfinite().sum() == (ROWS - 1) * COLUMNS


@pytest.mark.parametrize(
    ("of_x", "of_w"), [(-100, 0), (0, -100), (-50, -50), (60, 60), (100, -120), (-120, 100)]
)
def test_powers_of_two_only_scale_the_result(of_x: int, of_w: int) -> None:
    x, w = between_one_and_two(ROWS, DEPTH), between_one_and_two(DEPTH, COLUMNS)
    scaled = multiply(x * 2.0**of_x, w * 2.0**of_w)
    torch.testing.assert_close(
        scaled.double() * 2.0 ** -(of_x + of_w), x.double() @ w.double(), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("zero", ["x", "w", "both"])
def test_zeros_give_zeros(zero: str) -> None:
    x, w = torch.randn(ROWS, DEPTH), torch.randn(DEPTH, COLUMNS)
    if zero != "w":
        x.zero_()
    if zero != "x":
        w.zero_()
    assert torch.equal(multiply(x, w), torch.zeros(ROWS, COLUMNS))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    of_rows=st.lists(st.integers(-60, 30), min_size=3, max_size=3),
    of_columns=st.lists(st.integers(-60, 30), min_size=3, max_size=3),
    of_depth=st.lists(st.integers(-60, 30), min_size=2, max_size=2),
)
def test_products_of_numbers_of_all_sizes_are_precise(
    seed: int, of_rows: list[int], of_columns: list[int], of_depth: list[int]
) -> None:
    random = torch.Generator().manual_seed(seed)

    def powers(exponents: list[int], count: int) -> torch.Tensor:
        chosen = torch.randint(len(exponents), (count,), generator=random)
        return 2.0 ** torch.tensor(exponents)[chosen]

    inner = powers(of_depth, DEPTH)
    x = between_one_and_two(ROWS, DEPTH, random=random) * powers(of_rows, ROWS)[:, None] * inner
    w = between_one_and_two(DEPTH, COLUMNS, random=random) * powers(of_columns, COLUMNS)
    assert_as_precise_as_float32(multiply(x, w), x, w)

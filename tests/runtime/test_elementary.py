"""Elementary functions keep their digits: of tiny, large and special numbers, of wide angles."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")

INF, NAN = float("inf"), float("nan")
SPECIAL = (0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 3.0, -7.3, 100.0, 1e30, -1e30, INF, -INF, NAN)
DIGITS = {torch.float32: 2e-6, torch.float64: 1e-14}
Function = Callable[[torch.Tensor], torch.Tensor]
FUNCTIONS: tuple[Function, ...] = (
    torch.acosh,
    torch.angle,
    torch.asinh,
    torch.atan,
    torch.atanh,
    torch.expm1,
    torch.log10,
    torch.log1p,
    torch.sinh,
    torch.nn.functional.elu,
    torch.nn.functional.selu,
)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Give numbers of all sizes and both signs."""
    sizes = torch.logspace(-30, 30, 2001, dtype=torch.float64)
    sizes = sizes[(sizes < 88) | (sizes > 90)]  # eager's vectors of `sinh` overflow too soon there
    values = (sizes, -sizes, torch.linspace(-20, 20, 801), torch.tensor([0.0, INF, -INF, NAN]))
    return torch.cat(values).to(dtype)


def test_functions_of_numbers_of_all_sizes(counts: Counter[str]) -> None:
    def functions(*of_each_dtype: torch.Tensor) -> list[torch.Tensor]:
        return [function(x) for x in of_each_dtype for function in FUNCTIONS]

    given = [numbers(dtype) for dtype in DIGITS]
    found = torch.compile(functions, backend="npu_iree")(*given)
    cases = itertools.product(DIGITS, FUNCTIONS)
    for (dtype, function), one, other in zip(cases, found, functions(*given), strict=True):
        torch.testing.assert_close(
            one,
            other,
            rtol=DIGITS[dtype],
            atol=0,
            equal_nan=True,
            msg=lambda text, case=f"{function.__name__} of {dtype}": f"{case}: {text}",
        )
    assert (counts["regions"], counts["host_ops"]) == (1, 0)


def test_the_inverse_of_the_error_function(counts: Counter[str]) -> None:
    sizes = (
        torch.linspace(0, 1, 2001),
        1 - torch.logspace(-7, 0, 401),
        torch.logspace(-37, -1, 401),
        torch.tensor([0.0, 1.5, INF, NAN]),
    )
    x = torch.cat([*sizes, *(-x for x in sizes)])
    given = [x.to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]

    def inverses(*given: torch.Tensor) -> list[torch.Tensor]:
        return [torch.erfinv(x) for x in given]

    found = torch.compile(inverses, backend="npu_iree")(*given)
    for one, other in zip(found, inverses(*given), strict=True):
        digits = 2e-6 if one.dtype is torch.float32 else torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, other, rtol=digits, atol=0, equal_nan=True)
    assert (counts["regions"], counts["host_ops"]) == (1, 0)


@pytest.mark.sweep
def test_functions_of_doubles_that_the_cpu_back_end_has_not(counts: Counter[str]) -> None:
    def of_all(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.atan(x), torch.erf(x), torch.tanh(x)]

    def of_angles(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.sin(x), torch.cos(x), torch.tan(x)]

    def of_sines(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.asin(x), torch.acos(x)]

    def functions(*values: torch.Tensor) -> list[torch.Tensor]:
        every, angles, sines, powers = values
        return [*of_all(every), *of_angles(angles), *of_sines(sines), torch.log2(powers)]

    every = numbers(torch.float64)
    quarters = torch.arange(-100, 101).to(torch.float64) * (torch.pi / 2)
    close_to_one = 1 - torch.logspace(-16, 0, 401, dtype=torch.float64)
    values = (
        every,
        torch.cat([every[(every.abs() < 2**52) | ~every.isfinite()], quarters]),
        torch.cat([close_to_one, -close_to_one, torch.tensor([0.0, -0.0, 1.1, INF, NAN])]),
        torch.cat([every.abs(), 2.0 ** torch.arange(-1000, 1000).to(torch.float64)]),
    )
    found, expected = torch.compile(functions, backend="npu_iree")(*values), functions(*values)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-15, atol=0, equal_nan=True)
    assert (counts["regions"], counts["host_ops"]) == (1, 0)


def test_a_gelu_of_doubles_and_its_gradient(counts: Counter[str]) -> None:
    gelu = torch.nn.functional.gelu
    x = torch.linspace(-9, 9, 1001, dtype=torch.float64, requires_grad=True)
    found, expected = torch.compile(gelu, backend="npu_iree")(x), gelu(x)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)]
    for one, other in ((found, expected), gradients):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15)
    assert counts["host_ops"] == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_number_before_doubles_keeps_its_digits(dynamic: bool, counts: Counter[str]) -> None:
    def functions(x: torch.Tensor) -> list[torch.Tensor]:
        found = [0.1 - x, torch.rsub(x, 0.3, alpha=0.1), 0.1 / x, 0.1**x, 0.1 * x]
        return [*found, torch.xlogy(0.1, x), torch.where(x > 1, 0.1, x), torch.where(x > 1, x, 0.1)]

    x = torch.linspace(0.01, 9, 100, dtype=torch.float64)
    found = torch.compile(functions, backend="npu_iree", dynamic=dynamic)(x)
    for one, other in zip(found, functions(x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=0)
    assert counts["host_ops"] == 0


@pytest.mark.slow
def test_a_zero_keeps_its_sign() -> None:
    of_floats = (torch.sin, torch.tan, torch.asin, torch.atan, torch.tanh)
    of_each = {torch.float32: of_floats, torch.float64: (*of_floats, torch.erf)}

    def functions(*given: torch.Tensor) -> dict[str, torch.Tensor]:
        return {f"{f.__name__}, {x.dtype}": f(x) for x in given for f in of_each[x.dtype]}

    given = [torch.tensor([-0.0, 0.0], dtype=dtype) for dtype in of_each]
    for name, one in torch.compile(functions, backend="npu_iree")(*given).items():
        assert torch.signbit(one).tolist() == [True, False], name


def test_functions_of_two_numbers(counts: Counter[str]) -> None:
    def functions(*of_each_dtype: tuple[torch.Tensor, torch.Tensor]) -> list[list[torch.Tensor]]:
        return [
            [torch.atan2(x, y), torch.fmax(x, y), torch.fmin(x, y)]
            + ([torch.hypot(x, y)] if x.dtype.is_floating_point else [])
            for x, y in of_each_dtype
        ]

    numbers, given = torch.tensor([*SPECIAL, -0.0, 3e38, -3e38]), []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32):
        line = numbers if dtype.is_floating_point else torch.arange(-4.0, 5)
        pair = torch.meshgrid(line, line, indexing="ij")
        given.append(tuple(x.flatten().to(dtype) for x in pair))
    found = torch.compile(functions, backend="npu_iree")(*given)
    for ours, eagers in zip(found, functions(*given), strict=True):
        for one, other in zip(ours, eagers, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)
        signs = [torch.signbit(angles[eagers[0] == 0]) for angles in (ours[0], eagers[0])]
        assert_same(*signs)
    assert (counts["regions"], counts["host_ops"]) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_sines_of_the_positions_of_a_long_text(dynamic: bool) -> None:
    def sines(*of_each_dtype: torch.Tensor) -> list[torch.Tensor]:
        return [f(x) for x in of_each_dtype for f in (torch.sin, torch.cos)]

    positions = torch.arange(0, 1 << 20, 7).to(torch.float64)
    x = torch.cat([positions, -positions, positions * 90, torch.tensor([INF, NAN])])
    given = x.float(), x.bfloat16()
    found = torch.compile(sines, backend="npu_iree", dynamic=dynamic)(*given)
    for one, other in zip(found, sines(*given), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.sweep
def test_whole_quotients_and_what_they_leave(counts: Counter[str]) -> None:
    def divided(x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for y in (x[:, None], *SPECIAL):
            found += [x // y, torch.fmod(x, y), x % y, torch.div(x, y, rounding_mode="floor")]
        return [*found, *(function(y, x) for y in SPECIAL for function in (floor, rest))]

    def floor(y: float, x: torch.Tensor) -> torch.Tensor:
        return y // x

    def rest(y: float, x: torch.Tensor) -> torch.Tensor:
        return y % x

    x = torch.tensor([*SPECIAL, 2.1, 0.7, 0.1, 490.3, 12345678.0])
    for one, other in zip(torch.compile(divided, backend="npu_iree")(x), divided(x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0, equal_nan=True)
    assert counts["host_ops"] == 0


def test_remainders_by_a_number_are_by_what_the_dtype_holds_of_it() -> None:
    def rests(*given: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        return {str(x.dtype): [x % 0.7, torch.fmod(x, 0.7), x // 0.7, 0.7 % x] for x in given}

    x = torch.linspace(-20, 20, 801)
    given = x.bfloat16(), x.half(), x
    assert_same(torch.compile(rests, backend="npu_iree")(*given), rests(*given))


def test_what_is_left_of_a_zero_has_its_sign() -> None:
    def signs(x: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.fmod(x, 3.0), torch.fmod(x, 0.0), x // 3.0, x.trunc(), x.frac()]
        return [1 / result for result in found]

    x = torch.tensor([-0.0, 0.0, -0.3, 0.3, -6.0, 6.0, *SPECIAL])
    assert_same(torch.compile(signs, backend="npu_iree")(x), signs(x))


def test_a_nan_is_seen_beside_an_infinity_and_as_a_bound() -> None:
    def functions(x: torch.Tensor) -> list[Any]:
        pairs = (x[:, None], x[None, :])
        found = [
            torch.logaddexp(*pairs),
            torch.logaddexp2(*pairs),
            torch.clamp(x[:, None, None], *pairs),
        ]
        found += [torch.clamp_min(*pairs), torch.clamp_max(*pairs)]
        return found + [torch.clamp(x, low, high) for low in (-1.0, NAN) for high in (2.0, NAN)]

    x = torch.tensor(SPECIAL)
    assert_same(torch.compile(functions, backend="npu_iree")(x), functions(x))


def test_between_two_values_that_lie_otherwise() -> None:
    def between(
        *given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> dict[str, list[torch.Tensor]]:
        return {
            str(x.dtype): [
                torch.lerp(x.t(), y, 0.3),
                torch.lerp(x, y.t(), 0.9),
                torch.lerp(x.t(), y, w),
            ]
            for x, y, w in given
        }

    values, given = torch.tensor(SPECIAL), []
    for dtype in (torch.float32, torch.bfloat16):
        x, y = torch.broadcast_tensors(values.to(dtype)[:, None], values.to(dtype))
        given.append((x, y, torch.linspace(-0.5, 1.5, len(values)).to(dtype)))
    compiled = torch.compile(between, backend="npu_iree", options={"fallback": "error"})
    assert_same(compiled(*given), between(*given))


def test_sines_keep_their_digits(counts: Counter[str]) -> None:
    def sines(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sin(), x.cos(), x.tan(), torch.sinc(x / torch.pi)]

    small = torch.logspace(-30, 0, 601)
    eighths = torch.arange(0, 4000) * (torch.pi / 4)
    x = torch.cat([small, -small, torch.linspace(-30, 30, 20001), eighths, -eighths])
    found, expected = torch.compile(sines, backend="npu_iree")(x), sines(x)
    for one, other in zip(found[:2], expected, strict=False):
        torch.testing.assert_close(one, other, rtol=4e-7, atol=1e-10)
    for one, other in zip(found[2:], expected[2:], strict=True):
        is_plain = x.abs() < 1.5
        torch.testing.assert_close(one[is_plain], other[is_plain], rtol=1e-6, atol=0)
    assert (counts["regions"], counts["host_ops"]) == (1, 0)


def test_sines_of_what_is_too_large_are_sines(counts: Counter[str]) -> None:
    def sines(*given: torch.Tensor) -> list[torch.Tensor]:
        return [x.sin() for x in given]

    x = torch.cat([torch.logspace(8, 38, 301), torch.tensor([INF, NAN])])
    for found in torch.compile(sines, backend="npu_iree")(x, x.double()):
        assert_same(found.isnan(), x.isnan() | x.isinf())
        assert float(found[~found.isnan()].abs().max()) <= 1
    assert counts["host_ops"] == 0


def test_the_error_function_is_no_larger_than_one() -> None:
    """Else `log(1 - erf(x))` is NaN where eager has a number or -inf; a zero keeps its sign."""
    x = torch.cat([torch.linspace(-6, 6, 100001), torch.tensor([0.0, -0.0, INF, -INF, NAN])])
    found = torch.compile(torch.erf, backend="npu_iree", options={"fallback": "error"})(x)
    assert (found.abs() <= 1).sum() == len(x) - 1
    assert_same(found, torch.erf(x))
    assert torch.equal(found[-5:-1].signbit(), x[-5:-1].signbit())

"""Halves: long sums, powers and remainders are as near to the truth as eager's are."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dumps import signatures
from npu_iree.tolerances import largest_difference
from tolerances import assert_same

OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(),
    "cumsum": lambda x: x.cumsum(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
    "average pool": lambda x: F.avg_pool2d(x.view(4, 1, 64, 64), 32),
    "power": lambda x: torch.pow(x + 0.5, 3.3),
    "power of two": lambda x: torch.ldexp(x, torch.floor(x * 9)),
    "remainder": lambda x: torch.remainder(x * 40, 0.7),
    "floor division": lambda x: torch.div(x * 300, 0.7, rounding_mode="floor"),
}

OTHER = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
# One op with a number that is no half: eager computes most in floats, and sums with the half.
NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "times": lambda x: x * 0.1,
    "by": lambda x: x / 0.1,
    "plus": lambda x: x + 0.1,
    "minus": lambda x: x - 0.1,
    "times a tensor of one": lambda x: x * torch.tensor(0.1),
    "times a double": lambda x: x * torch.tensor(0.1, dtype=torch.float64),
    "times an integer": lambda x: x * 257,
    "by an integer": lambda x: x / 4001,
    "times a large integer": lambda x: x * 70000,
    "times a tensor of an integer": lambda x: x * torch.tensor(4001),
    "times the other half": lambda x: x * torch.tensor(0.1, dtype=OTHER[x.dtype]),
    "a tensor of one times": lambda x: torch.tensor(0.1) * x,
    "a tensor of one by": lambda x: torch.tensor(0.1) / x,
    "too large for a half": lambda x: x * 1e5,
    "too small for a half": lambda x: x * 1e-9,
    "between": lambda x: torch.lerp(x, x.flip(0), 0.1),
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "of integers": lambda x: (x * 8).int() * x[0, 0] * 0.1,
}

# Of halves, integers and halves up to 40000. Eager rounds what is no half beside halves, but for
# divisors, and computes in floats; it does so for what is asked for in halves, too.
ROUNDED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "rest by a float": lambda x, n, w: torch.remainder(x, torch.tensor(0.7)),
    "rest of sizes by a float": lambda x, n, w: torch.fmod(x, torch.tensor(0.7)),
    "to a float": lambda x, n, w: torch.pow(x, torch.tensor(3.3)),
    "to a number": lambda x, n, w: x**3.3,
    "of a number": lambda x, n, w: 0.7**x,
    "of a number that is too large": lambda x, n, w: 1e39**x,
    "rest of integers": lambda x, n, w: torch.remainder(n, x),
    "integers to halves": lambda x, n, w: torch.pow(n, x),
    "integers, rounded down": lambda x, n, w: torch.div(n, x, rounding_mode="floor"),
    "rounded down": lambda x, n, w: torch.div(x, torch.tensor(0.7), rounding_mode="floor"),
    "truncated": lambda x, n, w: torch.div(w, x, rounding_mode="trunc"),
    "truncated, by a float": lambda x, n, w: torch.div(x, torch.tensor(0.7), rounding_mode="trunc"),
    "between": lambda x, n, w: torch.lerp(-w, w, 0.25),
    "between, by tensors": lambda x, n, w: torch.lerp(-w, w, x),
    "products added": lambda x, n, w: torch._foreach_addcmul([-w], [x], [x], value=7)[0],
    "mean beside a variance": lambda x, n, w: torch.var_mean(w)[1],
    "mean of integers": lambda x, n, w: n.mean(dtype=x.dtype),
    "sum of floats": lambda x, n, w: (n % 2 * 0.3).sum(dtype=x.dtype),
    "sum of truths": lambda x, n, w: (n > 0).expand(40, -1).sum(dtype=x.dtype),
    "running sum of integers": lambda x, n, w: (n % 4).cumsum(0, dtype=x.dtype),
    "product of floats": lambda x, n, w: (n[:9] * 0.1).prod(dtype=x.dtype),
}

HALVES = [torch.float16, torch.bfloat16]
Conv = torch.nn.Conv2d
CONVOLUTIONS: dict[str, tuple[torch.nn.Module, tuple[int, ...]]] = {
    "next to each other": (Conv(8, 16, 3, padding=1), (2, 8, 20, 20)),
    "apart": (Conv(8, 16, 3, stride=2, padding=1), (2, 8, 21, 20)),
    "of one place": (Conv(8, 16, 1), (2, 8, 20, 20)),
    "of no place twice": (Conv(3, 16, 4, stride=4), (2, 3, 32, 32)),
    "by channel": (Conv(8, 8, 3, padding=1, groups=8), (2, 8, 20, 20)),
    "by channel, padded before": (
        torch.nn.Sequential(torch.nn.ZeroPad2d((0, 1, 0, 1)), Conv(64, 64, 3, 2, groups=64)),
        (1, 64, 56, 56),
    ),
    "of many places": (Conv(3, 4, 11, stride=4, padding=2), (1, 3, 35, 35)),
    "dilated": (Conv(3, 4, 3, stride=2, dilation=2), (1, 3, 12, 24)),
    "of rows": (torch.nn.Conv1d(8, 16, 3, padding=1), (2, 8, 50)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPS)
def test_it_is_as_exact_as_eager(name: str, dtype: torch.dtype) -> None:
    x = torch.rand(4, 4096).to(dtype)
    truth = OPS[name](x.double())
    eagers = largest_difference(OPS[name](x).double(), truth)
    ours = torch.compile(OPS[name], backend="npu_iree")(x)
    assert ours.dtype == dtype
    assert largest_difference(ours.double(), truth) <= 1.5 * eagers + 1e-4


@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_are_as_fine_as_in_eager(dtype: torch.dtype) -> None:
    def function(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: of(given[name]) for name, of in NUMBERS.items()}

    x = torch.linspace(-4, 4, 256).view(4, 64).to(dtype)
    given = {name: x.clone() for name in NUMBERS}  # and so a program for each
    ours = torch.compile(function, backend="npu_iree")(given)
    for name, expected in function(given).items():
        torch.testing.assert_close(
            ours[name], expected, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_no_half_is_rounded_where_eager_rounds_it(
    dtype: torch.dtype, counts: Counter[str]
) -> None:
    def function(*given: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: of(*given) for name, of in ROUNDED.items()}

    x, wide = (torch.linspace(*ends, 1501).to(dtype) for ends in ((0.1, 100), (2, 40000)))
    given = x, torch.arange(1501) * 3 + 7, wide
    found = torch.compile(function, backend="npu_iree", dynamic=False)(*given)
    for name, expected in function(*given).items():
        torch.testing.assert_close(
            found[name],
            expected,
            rtol=torch.finfo(dtype).eps,
            atol=0,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert counts["host_ops"] == 0


@pytest.mark.parametrize("dtype", HALVES)
@torch.no_grad()
def test_a_product_reads_halves_and_no_floats_made_of_them(dtype: torch.dtype, dump: Path) -> None:
    model, x = torch.nn.Linear(64, 96).to(dtype), torch.randn(20, 64).to(dtype)
    torch.compile(model, backend="npu_iree")(x)
    shapes = re.findall(r"tensor<([\dx]+)xf32", signatures(dump))
    elements = [math.prod(map(int, shape.split("x"))) for shape in shapes]
    assert max(elements, default=0) < 64 * 96, "the weight is in memory as floats"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_and_their_gradients_are_as_exact(
    name: str, dtype: torch.dtype, counts: Counter[str]
) -> None:
    module, shape = CONVOLUTIONS[name]
    model, x = copy.deepcopy(module).to(dtype), torch.randn(shape).to(dtype)

    def results(
        model: torch.nn.Module, run: Callable[..., torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        model.zero_grad()
        given = x.detach().to(dtype, copy=True).requires_grad_()
        y = run(given)
        places = torch.arange(y.numel(), dtype=torch.float32).view(y.shape)
        (y * places.sin().to(dtype)).sum().backward()
        return [y, given.grad, *(p.grad for p in model.parameters())]

    compiled = torch.compile(model, backend="npu_iree", dynamic=False)
    exact = copy.deepcopy(model).double()
    ours, eagers = results(model, compiled, dtype), results(model, model, dtype)
    for one, other, truth in zip(ours, eagers, results(exact, exact, torch.float64), strict=True):
        assert one.dtype == dtype
        error = largest_difference(other.double(), truth)
        assert largest_difference(one.double(), truth) <= 2 * error + 2e-3 * truth.abs().max()
    assert counts["host_ops"] == 0


def test_integers_are_rounded_as_by_eager(counts: Counter[str]) -> None:
    """By way of f32: what lies just above the middle of two halves is rounded twice."""

    def function(*given: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {f"{x.dtype} to {to}": (x.to(to), x.to(to) * 2) for x in given for to in HALVES}

    numbers = torch.tensor([0, 1, 3, 255, 257, 259, -259, 2049, 65535, 2**24 + 2**16 + 1, 7])
    given = [numbers.to(dtype) for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64)]
    assert_same(torch.compile(function, backend="npu_iree")(*given), function(*given))
    assert counts["host_ops"] == 0


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [48, 1000])
def test_what_is_rounded_on_purpose_stays_rounded(
    narrow: torch.dtype, wide: torch.dtype, size: int
) -> None:
    """And what is no number, or too large, is what eager makes of it."""

    def function(x: torch.Tensor) -> Any:
        y = (x * 0.5).to(narrow).to(wide)
        return torch.exp(y), torch.softmax((x - 1).to(narrow).to(wide), -1), y.sqrt() + y

    x = torch.randn(20, size) * 3
    x[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    compiled = torch.compile(function, backend="npu_iree", options={"fallback": "error"})
    for actual, expected in zip(compiled(x), function(x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("wide", [torch.float16, torch.float32, torch.float64], ids=str)
def test_what_is_computed_with_halves_is_computed_of_their_digits(wide: torch.dtype) -> None:
    """Each of them by itself: where the halves are results, too, they are rounded anyway."""

    def halves(function: Any) -> Any:
        return lambda x, y: function(x.to(torch.bfloat16), y.to(torch.bfloat16))

    functions = [
        *(torch.add, torch.mul, torch.lt, lambda a, _: a.exp(), lambda a, _: a.relu() * 3),
        lambda a, b: torch.where(a > 0, a, b) + 1,
        lambda a, _: a == a.double().to(torch.bfloat16),
        lambda a, _: (a * 64).to(torch.int32),
    ]
    x, y = torch.randn(2, 20, 50, dtype=torch.float64).to(wide)
    for function in map(halves, functions):
        compiled = torch.compile(function, backend="npu_iree", options={"fallback": "error"})
        torch.testing.assert_close(compiled(x, y), function(x, y), rtol=0, atol=0)

"""Sums of products, along several dimensions and of factors that are the same for some of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FUNCTIONS: tuple[Function, ...] = (
    lambda x, w: (x * w).sum(),
    lambda x, w: (x * w).sum((2, 3)),
    lambda x, w: (x * w).sum((1, 2, 3)),
    lambda x, w: (x * w).sum((0, 3)),
    lambda x, w: (x * w[:4, None, None]).sum(),
    lambda x, w: (x * w[:4, None, None]).sum((0, 2, 3)),
    lambda x, w: (x[:, :1] * x).sum((1, 2)),
    lambda x, w: torch.einsum("abcd,c->ab", x, w[:8]),
    lambda x, w: torch.einsum("abcd,ce->abe", x, w[:8, None] * w),
)
OF_FLOATS: tuple[Function, ...] = (
    lambda x, w: (x.sin() * w).mean(),
    lambda x, w: ((x - x.mean()) * w).mean((0, 2)),
    lambda x, w: (x.sum(0, keepdim=True) * x.sin()).sum(),
    lambda x, w: F.binary_cross_entropy_with_logits(x, x.sigmoid(), w),
)


@pytest.mark.parametrize(
    ("shape", "function"),
    [
        ([(1 << 20) + 5], lambda x: (x.sum(), x.mean())),
        ([1 << 17, 3], lambda x: (x.sum(0), x.mean(0, keepdim=True))),
        ([3, 4, 300, 301], lambda x: (x.sum((0, 2, 3)), x.square().mean((2, 3)))),
    ],
)
def test_long_sums_are_as_precise_as_eagers(
    shape: list[int], function: Callable[[torch.Tensor], Any], counts: Counter[str]
) -> None:
    """Of equal numbers, whose roundings do not cancel."""
    x = torch.full(shape, 0.1)
    actual = torch.compile(function, backend="npu_iree", options={"fallback": "error"})(x)
    torch.testing.assert_close(actual, function(x), rtol=3e-5, atol=0)
    assert counts["refused_flags"] == 0


@pytest.mark.sweep
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_sums_of_products(dtype: torch.dtype, is_dynamic: bool, counts: Counter[str]) -> None:
    functions = FUNCTIONS + (OF_FLOATS if dtype is torch.float32 else ())
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=generator) * 4 for s in ((3, 4, 8, 16), (16,)))
    for function in functions:  # each by itself: beside others, IREE fuses otherwise
        torch._dynamo.reset()
        options: dict[str, Any] = {"fallback": "error"}
        compiled = torch.compile(function, backend="npu_iree", dynamic=is_dynamic, options=options)
        args = x.to(dtype), w.to(dtype)
        assert_same(compiled(*args), function(*args))
    assert counts["refused_flags"] == 0

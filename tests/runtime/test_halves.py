"""Halves: long sums, powers and remainders are as near to the truth as eager's are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from npu_iree.tolerances import largest_difference

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPS)
def test_it_is_as_exact_as_eager(name: str, dtype: torch.dtype) -> None:
    x = torch.rand(4, 4096).to(dtype)
    truth = OPS[name](x.double())
    eagers = largest_difference(OPS[name](x).double(), truth)
    ours = torch.compile(OPS[name], backend="npu_iree")(x)
    assert ours.dtype == dtype
    assert largest_difference(ours.double(), truth) <= 1.5 * eagers + 1e-4

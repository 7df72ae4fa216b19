"""Our decomposition of batch norm in inference computes what eager's kernel does."""

from __future__ import annotations

import pytest
import torch

from lowering.decompositions.batch_norm import batch_norm
from tolerances import assert_same


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(), (5,), (5, 4), (3, 2, 4)])
@pytest.mark.parametrize("affine", [True, False])
def test_it_computes_what_eager_does(
    dtype: torch.dtype, sizes: tuple[int, ...], affine: bool
) -> None:
    x = torch.randn(4, 6, *sizes).to(dtype)
    weight, bias = (torch.randn(6).to(dtype) if affine else None for _ in range(2))
    mean, var = torch.randn(6).to(dtype), torch.rand(6).to(dtype) + 0.1
    args = (x, weight, bias, mean, var, 0.1, 1e-5)
    expected = torch.ops.aten._native_batch_norm_legit_no_training(*args)
    actual = batch_norm(*args)
    assert_same(actual[0], expected[0])
    assert [t.shape for t in actual[1:]] == [t.shape for t in expected[1:]]


@pytest.mark.parametrize("given", ["weight", "bias"])
def test_weight_and_bias_may_be_given_alone(given: str) -> None:
    x, mean, var = torch.randn(4, 6, 5), torch.randn(6), torch.rand(6) + 0.1
    one = torch.randn(6)
    weight, bias = (one, None) if given == "weight" else (None, one)
    expected = torch.nn.functional.batch_norm(x, mean, var, weight, bias)
    assert_same(batch_norm(x, weight, bias, mean, var, 0.1, 1e-5)[0], expected)

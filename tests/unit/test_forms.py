"""Ops in other words: with numbers that are tensors they compute what PyTorch does with numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npu_iree.torch_device.forms import FORMS
from tolerances import assert_same

aten = torch.ops.aten
ONES, WEIGHT = torch.ones(6), torch.linspace(1, 2, 6)
NORMS: dict[Any, tuple[Any, ...]] = {
    aten._native_batch_norm_legit.no_stats: (WEIGHT, None, True, 0.1, 1e-5),
    aten._native_batch_norm_legit_functional.default: (WEIGHT, None, ONES, ONES, True, 0.1, 1e-5),
    aten._native_batch_norm_legit_no_training.default: (WEIGHT, None, ONES, ONES, 0.1, 1e-5),
    aten.native_group_norm.default: (WEIGHT, None, 4, 6, 5, 2, 1e-5),
    aten.native_layer_norm.default: ([6], WEIGHT, None, 1e-5),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", NORMS, ids=str)
def test_norms_of_halves_give_statistics_in_the_floats_of_their_weights(
    op: Any, dtype: torch.dtype
) -> None:
    x = torch.linspace(-2, 5, 120, dtype=dtype).view(4, 5, 6)
    x = x if op is aten.native_layer_norm.default else x.mT.contiguous()
    results, expected = (f(x, *NORMS[op]) for f in (FORMS[op].function, op))
    for one, other in zip(results, expected, strict=True):
        if other.numel():
            assert_same(one, other)

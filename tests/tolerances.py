"""The one table of tolerances, by dtype: how far a result may be from eager's."""

from __future__ import annotations

from typing import Any

import torch

# dtype -> (rtol, atol); what is not listed must be equal.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
    torch.float32: (1e-4, 1e-5),
    torch.float64: (1e-9, 1e-11),
    torch.complex64: (1e-4, 1e-5),
    torch.complex128: (1e-9, 1e-11),
}


def assert_same(actual: Any, expected: Any) -> None:
    """Compare (trees of) results with eager's: values, dtypes, shapes and memory order."""
    if isinstance(expected, torch.Tensor):
        rtol, atol = TOLERANCES.get(expected.dtype, (0.0, 0.0))
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
        return
    if isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
        return
    assert actual == expected


def largest_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Give the largest absolute difference, relative to the largest absolute value."""
    scale = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    return float((actual - expected).abs().max() / scale)

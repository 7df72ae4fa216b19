"""The one table of tolerances, by dtype: how far a result may be from eager's."""

from __future__ import annotations

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


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """Return (rtol, atol) for a dtype."""
    return TOLERANCES.get(dtype, (0.0, 0.0))


def largest_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Give the largest absolute difference, relative to the largest absolute value expected."""
    if expected.numel() == 0:
        return 0.0
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return float((actual != expected).any())
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    scale = largest_finite(expected)
    difference = torch.where(same, 0.0, (actual - expected).abs().to(torch.float64)).max()
    return float(difference / scale.to(torch.float64).clamp_min(1e-30))


def largest_finite(values: torch.Tensor) -> torch.Tensor:
    """Give the largest absolute value of those that are numbers; 0 if none is."""
    finite = values.abs()[values.isfinite()]
    return finite.max() if finite.numel() else finite.new_zeros(())

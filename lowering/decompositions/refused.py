"""Decompositions that refuse the values that eager refuses, where PyTorch's take them."""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import get_decompositions

aten = torch.ops.aten
_PYTORCHS = get_decompositions([aten.bernoulli.default, aten.binary_cross_entropy])


def bernoulli(p: torch.Tensor, *, generator: torch.Generator | None = None) -> Any:
    """Decompose `aten.bernoulli`, of probabilities only."""
    _assert_between_0_and_1(p, "Expected p_in >= 0 && p_in <= 1 to be true, but got false.")
    return _PYTORCHS[aten.bernoulli.default](p, generator=generator)


def binary_cross_entropy(x: torch.Tensor, target: torch.Tensor, *args: Any) -> Any:
    """Decompose `aten.binary_cross_entropy` of values between 0 and 1."""
    for name, given in (("input", x), ("target", target)):
        _assert_between_0_and_1(given, f"all elements of {name} should be between 0 and 1")
    return _PYTORCHS[aten.binary_cross_entropy.default](x, target, *args)


def _assert_between_0_and_1(x: torch.Tensor, text: str) -> None:
    aten._assert_async.msg(((x >= 0) & (x <= 1)).all(), text)


DECOMPOSITIONS = {
    aten.bernoulli.default: bernoulli,
    aten.binary_cross_entropy.default: binary_cross_entropy,
}

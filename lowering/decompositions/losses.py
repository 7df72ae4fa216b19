"""Losses that eager refuses for their values."""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import get_decompositions

aten = torch.ops.aten
_PYTORCHS = get_decompositions([aten.binary_cross_entropy])


def binary_cross_entropy(x: torch.Tensor, target: torch.Tensor, *args: Any) -> Any:
    """Decompose `aten.binary_cross_entropy`: PyTorch does not check values between 0 and 1."""
    for name, given in (("input", x), ("target", target)):
        text = f"all elements of {name} should be between 0 and 1"
        aten._assert_async.msg(((given >= 0) & (given <= 1)).all(), text)
    return _PYTORCHS[aten.binary_cross_entropy.default](x, target, *args)


DECOMPOSITIONS = {aten.binary_cross_entropy.default: binary_cross_entropy}

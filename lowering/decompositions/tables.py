"""Tables of decompositions: what is in them, and what stands for an op that has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Decomposition = Callable[..., Any]
Table: TypeAlias = dict[torch._ops.OpOverload, Decomposition]


def left_whole(*args: Any, **kwargs: Any) -> Any:
    """Return `NotImplemented`, with which PyTorch keeps an op whole."""
    return NotImplemented

"""Sizes that are known, and sizes that PyTorch lets one write once for all dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def is_static(*tensors: torch.Tensor) -> bool:
    """Say whether all sizes of tensors are numbers, not symbols."""
    return all(are_known(tensor.shape) for tensor in tensors)


def are_known(sizes: Sequence[int]) -> bool:
    """Say whether all of these sizes are numbers, not symbols."""
    return all(isinstance(size, int) for size in sizes)


def of_each(values: Sequence[int], rank: int) -> list[int]:
    """Give one value a dimension: a single one is for all."""
    return list(values) * rank if len(values) == 1 else list(values)


def size_hint(size: int | torch.SymInt) -> int:
    """Return a size, or what a symbolic one was when it was captured; 2 if that is not known."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 2


def settled(size: Any) -> Any:
    """Return the number that a symbolic size has become since it was captured, else the size."""
    known = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None
    return size if known is None else known

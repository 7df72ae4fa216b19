"""Sizes that are known, and sizes that PyTorch lets one write once for all dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true


def is_static(*tensors: torch.Tensor) -> bool:
    """Say whether all sizes of tensors are numbers, not symbols."""
    return all(are_known(tensor.shape) for tensor in tensors)


def are_known(sizes: Sequence[int]) -> bool:
    """Say whether all of these sizes are numbers, not symbols."""
    return all(isinstance(size, int) for size in sizes)


def are_empty(*tensors: torch.Tensor) -> bool:
    """Say whether one of these tensors is known to have no elements."""
    return any(isinstance(size, int) and size == 0 for t in tensors for size in t.shape)


def has_elements(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is known to have an element, whatever numbers symbols stand for."""
    return all(statically_known_true(size > 0) for size in tensor.shape)


def are_same(sizes: Sequence[int], others: Sequence[int]) -> bool:
    """Say whether these sizes are those, whatever numbers symbols stand for."""
    if len(sizes) != len(others):
        return False
    return all(statically_known_true(a == b) for a, b in zip(sizes, others, strict=True))


def of_each(values: Sequence[int], rank: int) -> list[int]:
    """Give one value a dimension: a single one is for all."""
    return list(values) * rank if len(values) == 1 else list(values)


def size_hint(size: int | torch.SymInt) -> int:
    """Return a size, or what a symbolic one was when it was captured; 2 if that is not known."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 2


def settled(value: Any) -> Any:
    """Give a size, or a fake value, with numbers for what has become such since it was captured.

    So has a symbol that was found to be one number, and what a guard says of `s0 // 64`: a view
    that leaves out a size because it is 1 makes sure of that, and its own sizes count on it.
    """
    if isinstance(value, torch.SymInt):
        number = value.node.maybe_as_int()
        if number is None and value.node.expr.args and size_hint(value) == 1:
            number = 1 if statically_known_true(value == 1) else None
        return value if number is None else number
    if isinstance(value, (tuple, list)):
        return type(value)(map(settled, value))
    if not isinstance(value, torch.Tensor):
        return value
    layout = [*value.shape, *value.stride()]
    known = [settled(size) for size in layout]
    if [*map(type, known)] == [*map(type, layout)]:
        return value
    return value.new_empty_strided(known[: value.dim()], known[value.dim() :])

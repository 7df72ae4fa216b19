"""Views of tensors with dynamic sizes, in the form that torch-mlir lowers rightly.

torch-mlir lowers a view that merges two dynamic dimensions as if one of them were 1. Collapsing
them first, and only then splitting, is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch._prims_common import infer_size
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import _disable_current_modes

Size: TypeAlias = Any  # int or SymInt
_UNCHANGED: Any = NotImplemented  # PyTorch then keeps the op whole


def view(tensor: torch.Tensor, size: Sequence[Size]) -> Any:
    """Decompose `aten.view`: merged dimensions become `prims.collapse`, the rest stays a view.

    Before: %1 = aten.view(%0, [s0*s1, 8, 8])                      with %0 of [s0, s1, 64]
    After:  %1 = prims.collapse(%0, 0, 1); %2 = aten.view(%1, [s0*s1, 8, 8])

    An exported graph may hold views of what another decomposition has laid out in another way than
    the kernel did when it was exported; these become views of a copy.
    """
    if all(isinstance(s, int) for s in (*tensor.shape, *size)):
        return (
            torch.ops.aten.view.default(_dense(tensor), size)
            if _copies(tensor, size)
            else _UNCHANGED
        )
    groups = shared_factors(tensor.shape, infer_size(tuple(size), tensor.numel()))
    if groups is None or all(count == 1 for count, _ in groups):
        return _UNCHANGED  # nothing is merged
    collapsed: Any = tensor
    for axis, (count, _) in enumerate(groups):
        if count > 1:
            collapsed = torch.ops.prims.collapse(collapsed, axis, axis + count - 1)
    if collapsed.dim() == len(size):
        return collapsed
    return torch.ops.aten.view.default(collapsed, [s for _, sizes in groups for s in sizes])


def split_with_sizes(tensor: torch.Tensor, sizes: Sequence[Size], dim: int = 0) -> Any:
    """Decompose `aten.split_with_sizes` at dynamic sizes, which torch-mlir refuses, into slices."""
    if all(isinstance(s, int) for s in (*tensor.shape, *sizes)):
        return _UNCHANGED
    starts = itertools.accumulate(sizes, initial=0)
    pairs = zip(starts, sizes, strict=False)
    return [torch.ops.aten.slice.Tensor(tensor, dim, start, start + size) for start, size in pairs]


def _copies(tensor: torch.Tensor, size: Sequence[int]) -> bool:
    """Say whether a tensor has no view of this size."""
    if tensor.is_contiguous():
        return False
    with _disable_current_modes():
        try:
            torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(list(size))
        except (RuntimeError, ValueError):
            return True
    return False


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    copy: torch.Tensor = torch.ops.aten.clone.default(tensor, memory_format=torch.contiguous_format)
    return copy


def shared_factors(old: Sequence[Size], new: Sequence[Size]) -> list[tuple[int, list[Size]]] | None:
    """Match dimensions of two shapes of one size: groups whose products are equal.

    Returns:
        For each group how many old dimensions it has, and its new sizes; None if the sizes do not
        say which belong together.
    """
    if not old or not new:
        return None
    groups: list[tuple[int, list[Size]]] = []
    olds, news = list(old), list(new)
    while olds and news:
        count, sizes = 1, [news.pop(0)]
        before, after = olds.pop(0), sizes[0]
        while not statically_known_true(before == after):
            if olds and (not news or _divides(before, after)):
                before, count = before * olds.pop(0), count + 1
            elif news:
                sizes.append(news.pop(0))
                after = after * sizes[-1]
            else:
                return None
        groups.append((count, sizes))
    count, sizes = groups[-1]  # what is left has size 1 and belongs to the last group
    groups[-1] = (count + len(olds), sizes + news)
    return groups


def _divides(divisor: Size, number: Size) -> bool:
    if isinstance(divisor, int) and divisor == 0:
        return False
    return bool(statically_known_true(number % divisor == 0))

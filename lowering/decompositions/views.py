"""Views of tensors that have no such view, and splits of dynamic sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch._prims_common import is_contiguous_or_false
from torch.utils._python_dispatch import _disable_current_modes

from lowering.sizes import size_hint

Size: TypeAlias = Any  # int or SymInt
_UNCHANGED: Any = NotImplemented  # PyTorch then keeps the op whole


def view(tensor: torch.Tensor, size: Sequence[Size]) -> Any:
    """Decompose `aten.view` of a tensor that has no such view into one of a copy.

    An exported graph may hold views of what another decomposition has laid out in another way than
    the kernel did when it was exported.
    """
    if not _copies(tensor, size):
        return _UNCHANGED
    copy = torch.ops.aten.clone.default(tensor, memory_format=torch.contiguous_format)
    return torch.ops.aten.view.default(copy, size)


def split_with_sizes(tensor: torch.Tensor, sizes: Sequence[Size], dim: int = 0) -> Any:
    """Decompose `aten.split_with_sizes` at dynamic sizes, which torch-mlir refuses, into slices."""
    if all(isinstance(s, int) for s in (*tensor.shape, *sizes)):
        return _UNCHANGED
    starts = itertools.accumulate(sizes, initial=0)
    pairs = zip(starts, sizes, strict=False)
    return [torch.ops.aten.slice.Tensor(tensor, dim, start, start + size) for start, size in pairs]


def _copies(tensor: torch.Tensor, size: Sequence[Size]) -> bool:
    """Say whether a tensor has no view of this size; symbolic sizes are what they were captured."""
    if is_contiguous_or_false(tensor):
        return False
    sizes, strides, wanted = (
        [size_hint(s) for s in x] for x in (tensor.shape, tensor.stride(), size)
    )
    with _disable_current_modes():
        try:
            torch.empty_strided(sizes, strides, device="meta").view(wanted)
        except (RuntimeError, ValueError):
            return True
    return False

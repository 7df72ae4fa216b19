"""Views of tensors that have no such view or of dynamic sizes, and splits of these."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch._prims_common import is_contiguous_or_false, make_contiguous_strides_for
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from lowering.sizes import are_known, size_hint

Size: TypeAlias = Any  # int or SymInt


def view(tensor: torch.Tensor, size: Sequence[Size]) -> Any:
    """Decompose `aten.view` of a tensor that has no such view into one of a copy.

    An exported graph may hold views of what another decomposition has laid out in another way than
    the kernel did when it was exported. A view that the tensor has gets the sizes asked for.
    """
    if not _copies(tensor, size):
        return _of_asked_sizes(tensor, size)
    copy = torch.ops.aten.clone.default(tensor, memory_format=torch.contiguous_format)
    return torch.ops.aten.view.default(copy, size)


def split_with_sizes(tensor: torch.Tensor, sizes: Sequence[Size], dim: int = 0) -> Any:
    """Decompose `aten.split_with_sizes` at dynamic sizes, which torch-mlir refuses, into slices."""
    if all(isinstance(s, int) for s in (*tensor.shape, *sizes)):
        return NotImplemented
    starts = itertools.accumulate(sizes, initial=0)
    pairs = zip(starts, sizes, strict=False)
    return [torch.ops.aten.slice.Tensor(tensor, dim, start, start + size) for start, size in pairs]


def squeeze(tensor: torch.Tensor, dims: Sequence[int] | int | None = None) -> Any:
    """Decompose `aten.squeeze` of dimensions into one of each that is known to be 1.

    PyTorch makes `prims.squeeze` of it, which cannot be traced again, as the bodies of `torch.cond`
    are in training.
    """
    rank = tensor.dim()
    asked = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
    ones = {dim % rank for dim in asked if rank and guard_or_false(tensor.shape[dim] == 1)}
    if isinstance(dims, int) and ones:
        return NotImplemented
    for dim in sorted(ones, reverse=True):
        tensor = torch.ops.aten.squeeze.dim(tensor, dim)
    return tensor if ones else torch.ops.aten.alias.default(tensor)


def _of_asked_sizes(tensor: torch.Tensor, size: Sequence[Size]) -> Any:
    """View a tensor, with the sizes that were asked for where they are numbers.

    PyTorch computes the last size of those that a dynamic one is taken apart to, and does not see
    that it is a number: `x.view(-1, 64)` of `[s0, s1]` has `s0*s1 // (s0*s1 // 64)` columns.
    """
    tracer = getattr(get_proxy_mode(), "tracer", None)
    if are_known(tensor.shape) or not isinstance(tracer, PythonKeyTracer):
        return NotImplemented
    with disable_proxy_modes_tracing():
        viewed = torch.ops.aten.view.default(tensor, size)
        pairs = zip(size, viewed.shape, strict=True)
        asked = [a if isinstance(a, int) and a != -1 else found for a, found in pairs]
        if [*map(type, asked)] == [*map(type, viewed.shape)] or not is_contiguous_or_false(viewed):
            return NotImplemented
        viewed = viewed.as_strided(asked, make_contiguous_strides_for(asked))
    arguments = tree_map(tracer.unwrap_proxy, (tensor, list(size)))
    proxy = tracer.create_proxy("call_function", torch.ops.aten.view.default, arguments, {})
    return track_tensor_tree(viewed, proxy, constant=None, tracer=tracer)


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


DECOMPOSITIONS = {
    torch.ops.aten.split_with_sizes.default: split_with_sizes,
    torch.ops.aten.squeeze.default: squeeze,
    torch.ops.aten.squeeze.dim: squeeze,
    torch.ops.aten.squeeze.dims: squeeze,
    torch.ops.aten.view.default: view,
}

"""Results whose channels come last in memory, as eager's do, where those of an image come last."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils import _pytree as pytree

aten = torch.ops.aten
Decomposition = Callable[..., Any]

# Their pieces give what is contiguous. A convolution looks at its weight, too.
OF_IMAGES: tuple[torch._ops.OpOverload, ...] = (
    aten._adaptive_avg_pool2d.default,
    aten.adaptive_max_pool2d.default,
    aten.convolution.default,
)


def with_layouts(table: dict[torch._ops.OpOverload, Decomposition]) -> dict[Any, Decomposition]:
    """Return decompositions of the ops above, each with the layout of what it computes kept.

    Before: %1 = _adaptive_avg_pool2d(%0, [3, 3])         with %0 of [2, 8, 7, 7] in channels_last
    After:  %1 = clone(<its pieces>, memory_format=channels_last)
    """
    return {op: _kept(table[op]) for op in OF_IMAGES}


def _kept(decomposition: Decomposition) -> Decomposition:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        results = decomposition(*args, **kwargs)
        images = [arg for arg in args[:2] if isinstance(arg, torch.Tensor) and arg.dim() == 4]
        last = torch.channels_last
        if results is NotImplemented or last not in map(suggest_memory_format, images):
            return results
        lay_out = functools.partial(torch.Tensor.contiguous, memory_format=last)
        return pytree.tree_map_only(torch.Tensor, lay_out, results)

    return decomposed

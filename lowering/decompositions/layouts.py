"""Results that lie in memory as eager's do, where those of an op's pieces lie otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._prims_common import (
    compute_elementwise_output_logical_to_physical_perm,
    is_contiguous_or_false,
    suggest_memory_format,
)
from torch.fx.experimental.symbolic_shapes import has_guarding_hint
from torch.utils import _pytree as pytree

from lowering.decompositions.tables import Decomposition
from lowering.signature import inverse

aten = torch.ops.aten
# Takes a result and the arguments; returns the result as eager lays it out.
Layout = Callable[[torch.Tensor, Sequence[Any]], torch.Tensor]


def _image(result: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    """Put channels last if those of an image come last; a convolution looks at its weight, too."""
    images = [arg for arg in args[:2] if isinstance(arg, torch.Tensor) and arg.dim() == 4]
    formats = [suggest_memory_format(image) for image in images]
    if torch.channels_last in formats:
        return result.contiguous(memory_format=torch.channels_last)
    return result.contiguous() if images else result


def _gradient_of_image(result: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    return _image(result, args[1:3]) if result.dim() == 4 else result


def _gradient_of_padded(result: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    return result.contiguous(memory_format=suggest_memory_format(args[1]))


def _convolved(result: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    """Put channels where they are in what PyTorch's kernel for such a convolution makes."""
    image, weight, bias, *amounts = args
    if not all(map(has_guarding_hint, (*image.shape, *weight.shape))):
        return _image(result, args)
    made = torch._C._select_conv_backend(image, weight, bias, *amounts)
    if weight.dim() > 3:
        how = torch._C._conv_determine_backend_memory_format(image, weight, made)
        return result.contiguous(memory_format=how)
    # Of a line, it is an image of one row.
    row, weight_row = image.contiguous().unsqueeze(2), weight.unsqueeze(2)
    how = torch._C._conv_determine_backend_memory_format(row, weight_row, made)
    return result.unsqueeze(2).contiguous(memory_format=how).squeeze(2)


def _gradient_of_convolved(result: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    image, weight, _, *amounts = args[1:10]
    is_of_bias = result.dim() == 1
    return result if is_of_bias else _convolved(result, (image, weight, None, *amounts))


def _natural(result: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    return result.contiguous()


def _like_first(result: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    if result.dim() != args[0].dim():
        return result
    order, _ = compute_elementwise_output_logical_to_physical_perm(args[0])
    return _in_order(result, order)


def _heads_behind_rows(result: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    return _in_order(result, (0, 2, 1, 3))


def _columns(result: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    return result.mT.contiguous().mT  # as LAPACK has them


def _in_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    stored = tensor.permute(*order)
    return tensor if is_contiguous_or_false(stored) else stored.contiguous().permute(inverse(order))


LAYOUTS: Mapping[torch._ops.OpOverload, Layout] = {
    aten._adaptive_avg_pool2d.default: _image,
    aten._adaptive_avg_pool2d_backward.default: _gradient_of_image,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _like_first,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _heads_behind_rows,
    aten.adaptive_max_pool2d.default: _image,
    aten.adaptive_max_pool2d_backward.default: _gradient_of_image,
    aten.avg_pool2d_backward.default: _gradient_of_image,
    aten.baddbmm.default: _natural,
    aten.convolution.default: _convolved,
    aten.convolution_backward.default: _gradient_of_convolved,
    aten.cummax.default: _natural,
    aten.cummin.default: _natural,
    aten.diagonal_scatter.default: _like_first,
    aten.linalg_solve_triangular.default: _columns,
    aten.masked_scatter.default: _natural,
    aten.max_pool2d_with_indices.default: _image,
    aten.max_pool2d_with_indices_backward.default: _gradient_of_image,
    aten.replication_pad2d_backward.default: _gradient_of_padded,
    aten.replication_pad3d_backward.default: _gradient_of_padded,
    aten.scatter_add.default: _natural,
    aten.select_scatter.default: _like_first,
    aten.upsample_nearest1d.default: _natural,
}


def with_layouts(table: Mapping[torch._ops.OpOverload, Decomposition]) -> dict[Any, Decomposition]:
    """Return decompositions of the ops above, each with the layout of what it computes kept.

    Before: %1 = _adaptive_avg_pool2d(%0, [3, 3])         with %0 of [2, 8, 7, 7] in channels_last
    After:  %1 = clone(<its pieces>, memory_format=channels_last)
    """
    return {op: _kept(table[op], layout) for op, layout in LAYOUTS.items()}


def _kept(decomposition: Decomposition, layout: Layout) -> Decomposition:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        results = decomposition(*args, **kwargs)
        if results is NotImplemented:
            return results
        return pytree.tree_map_only(torch.Tensor, lambda t: layout(t, args), results)

    return decomposed

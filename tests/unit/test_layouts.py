"""What is decomposed lies in memory as eager's result does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from lowering.decompositions import decomposition_table
from lowering.decompositions.layouts import LAYOUTS

aten = torch.ops.aten
LAST = torch.channels_last
INPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "first": torch.Tensor.contiguous,
    "last": lambda x: x.to(memory_format=LAST),
    "transposed": lambda x: x.mT.contiguous().mT,
    "permuted": lambda x: x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
}


def space(image: torch.Tensor) -> torch.Tensor:
    """Make a space of two layers of images; its channels come last where theirs do."""
    is_last = image.is_contiguous(memory_format=LAST)
    how = torch.channels_last_3d if is_last else torch.contiguous_format
    return torch.stack([image, image + 1], 2).contiguous(memory_format=how)


FLASH = aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
CALLS: dict[str, tuple[Any, Callable[[torch.Tensor], list[Any]]]] = {
    "means": (aten._adaptive_avg_pool2d.default, lambda x: [x, [5, 3]]),
    "maxima of one length": (aten.adaptive_max_pool2d.default, lambda x: [x, [4, 3]]),
    "maxima of several": (aten.adaptive_max_pool2d.default, lambda x: [x, [5, 5]]),
    "transposed": (
        aten.convolution.default,
        lambda x: [x, x.new_ones(4, 1, 3, 3), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 4],
    ),
    "rows that are added": (
        aten.scatter_add.default,
        lambda x: [x, 1, torch.tensor([3, 0, 3]).view(1, 3, 1, 1).expand(2, 3, 8, 9), x],
    ),
    "by its weight": (
        aten.convolution.default,
        lambda x: [
            x.contiguous(),
            x.new_ones(4, 3, 3, 2).to(memory_format=LAST),
            *(None, [1, 1], [0, 0], [1, 1], True, [0, 0], 2),
        ],
    ),
    "gradients of what is transposed": (
        aten.convolution_backward.default,
        lambda x: [
            *(x.new_ones(2, 6, 17, 19), x, x.new_ones(4, 3, 3, 3), [0]),
            *([2, 2], [0, 0], [1, 1], True, [0, 0], 2, [True, True, False]),
        ],
    ),
    "gradients of rows": (
        aten.convolution_backward.default,
        lambda x: [
            *(x.new_ones(2, 6, 70), x[:, :, :, 0], x.new_ones(6, 2, 3).mT.contiguous().mT, [6]),
            *([1], [32], [1], False, [0], 2, [True, True, True]),
        ],
    ),
    "spaces": (
        aten.convolution.default,
        lambda x: [
            *(space(x), space(x.new_ones(4, 3, 3, 2)), None),
            *([1, 1, 1], [0, 0, 0], [1, 1, 1], True, [0, 0, 0], 2),
        ],
    ),
    "gradients of spaces": (
        aten.convolution_backward.default,
        lambda x: [
            *(x.new_ones(2, 6, 2, 7, 8), space(x), x.new_ones(6, 4, 1, 2, 2), [6]),
            *([1, 1, 1], [0, 0, 0], [1, 1, 1], False, [0, 0, 0], 1, [True, True, True]),
        ],
    ),
    "gradients of spaces in bf16": (
        aten.convolution_backward.default,
        lambda x: [
            *(x.new_ones(2, 6, 4, 9, 10).bfloat16(), space(x).bfloat16()),
            *(x.new_ones(4, 3, 3, 2, 2).bfloat16(), [0]),
            *([1, 1, 1], [0, 0, 0], [1, 1, 1], True, [0, 0, 0], 2, [True, True, False]),
        ],
    ),
    "gradients of means": (
        aten._adaptive_avg_pool2d_backward.default,
        lambda x: [x[:, :, :3, :3] * 1, x],
    ),
    "gradients of maxima of several": (
        aten.adaptive_max_pool2d_backward.default,
        lambda x: [x[:, :, :5, :5] * 1, x, aten.adaptive_max_pool2d(x, [5, 5])[1]],
    ),
    "gradients of means of windows": (
        aten.avg_pool2d_backward.default,
        lambda x: [x[:, :, :4, :4] * 1, x, [2, 2], [2, 2], [0, 0], False, True, None],
    ),
    "maxima of windows": (
        aten.max_pool2d_with_indices.default,
        lambda x: [x, [2, 2]],
    ),
    "gradients of maxima of windows": (
        aten.max_pool2d_with_indices_backward.default,
        lambda x: [
            *(x[:, :, :4, :4] * 1, x, [2, 2], [2, 2], [0, 0], [1, 1], False),
            aten.max_pool2d_with_indices(x, [2, 2])[1],
        ],
    ),
    "gradients of repeated edges": (
        aten.replication_pad2d_backward.default,
        lambda x: [x[:, :, :7] * 1, x, [1, -1, -2, 1]],
    ),
    "gradients of repeated sides": (
        aten.replication_pad3d_backward.default,
        lambda x: [space(x), space(x), [1, -1, 0, 0, 0, 0]],
    ),
    "added products": (
        aten.baddbmm.default,
        lambda x: [x[0, :, :, :8], x[0, :, :, :8], x[1, ..., :8]],
    ),
    "largest so far": (aten.cummax.default, lambda x: [x, 1]),
    "smallest so far": (aten.cummin.default, lambda x: [x, 1]),
    "put on a diagonal": (
        aten.diagonal_scatter.default,
        lambda x: [x, x.new_ones(2, 4, 8), 0, 2, 3],
    ),
    "put in one place": (aten.select_scatter.default, lambda x: [x, x.new_ones(2, 8, 9), 1, 0]),
    "solved": (
        aten.linalg_solve_triangular.default,
        lambda x: [x[..., :8] + 8 * torch.eye(8), x],
    ),
    "put where it says": (aten.masked_scatter.default, lambda x: [x, x > 0.5, x.new_ones(600)]),
    "enlarged": (aten.upsample_nearest1d.default, lambda x: [x[0], [18]]),
    "attention": (FLASH.default, lambda x: [x.contiguous().transpose(1, 2)] * 3),
    "gradients of attention": (
        FLASH_BACKWARD.default,
        lambda x: [*[x := x.contiguous()] * 4, *FLASH(x, x, x), 0.0, False],
    ),
}
NAMED = {aten.linalg_solve_triangular.default: {"upper": True}}
RETURNED = {FLASH.default: 1}  # the statistics of its rows are for the backward pass alone


@pytest.mark.parametrize("layout", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results_lie_where_eager_has_them(
    call: Any, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    op, arguments = call
    given = arguments(layout(torch.linspace(0, 1, 2 * 4 * 8 * 9).view(2, 4, 8, 9)))
    expected, actual = (
        pytree.tree_leaves(function(*given, **NAMED.get(op, {})))[: RETURNED.get(op)]
        for function in (op, decomposition_table()[op])
    )
    torch.testing.assert_close(actual, expected, check_stride=True)


def test_each_op_that_keeps_its_layout_is_called_here() -> None:
    assert {op for op, _ in CALLS.values()} == set(LAYOUTS)

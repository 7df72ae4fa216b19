"""What is decomposed lies in memory as eager's result does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from lowering.decompositions import decomposition_table
from lowering.decompositions.layouts import OF_IMAGES

aten = torch.ops.aten
LAST, FIRST = torch.channels_last, torch.contiguous_format
CALLS: dict[str, tuple[Any, Callable[[torch.Tensor], list[Any]]]] = {
    "means": (aten._adaptive_avg_pool2d.default, lambda x: [x, [5, 3]]),
    "maxima of one length": (aten.adaptive_max_pool2d.default, lambda x: [x, [4, 3]]),
    "maxima of several": (aten.adaptive_max_pool2d.default, lambda x: [x, [5, 5]]),
    "transposed": (
        aten.convolution.default,
        lambda x: [x, x.new_ones(4, 1, 3, 3), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 4],
    ),
    "by its weight": (
        aten.convolution.default,
        lambda x: [
            x.contiguous(),
            x.new_ones(4, 3, 3, 2).to(memory_format=LAST),
            *(None, [1, 1], [0, 0], [1, 1], True, [0, 0], 2),
        ],
    ),
}


@pytest.mark.parametrize("layout", [LAST, FIRST], ids=["last", "first"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_channels_are_where_eager_has_them(call: Any, layout: torch.memory_format) -> None:
    op, arguments = call
    given = arguments(torch.arange(2 * 4 * 8 * 9.0).view(2, 4, 8, 9).to(memory_format=layout))
    expected = pytree.tree_leaves(op(*given))
    actual = pytree.tree_leaves(decomposition_table()[op](*given))
    torch.testing.assert_close(actual, expected, check_stride=True)


def test_each_op_that_keeps_its_layout_is_called_here() -> None:
    assert {op for op, _ in CALLS.values()} == set(OF_IMAGES)

"""Convolutions of volumes as those of images, beside PyTorch's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lowering.decompositions import volumes
from lowering.decompositions.convolution import DECOMPOSITIONS

aten = torch.ops.aten
# The kernel, stride, padding and dilation.
WINDOWS = (
    ((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    ((3, 2, 1), (2, 1, 2), (1, 0, 0), (1, 2, 1)),
    ((2, 3, 3), (3, 2, 1), (0, 1, 2), (2, 1, 1)),
    ((2, 4, 4), (2, 4, 4), (0, 0, 0), (1, 1, 1)),
    ((1, 1, 1), (2, 1, 1), (0, 0, 0), (1, 1, 1)),
    ((2, 1, 1), (1, 1, 1), (3, 0, 0), (1, 1, 1)),  # padded by more than the window
)


def given(kernel: tuple[int, ...], groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 6, 8, 7, dtype=torch.float64, generator=generator)
    return x, torch.randn(6, 4 // groups, *kernel, dtype=torch.float64, generator=generator)


def convolve(x: torch.Tensor, weight: torch.Tensor, window: volumes.Window) -> torch.Tensor:
    y: torch.Tensor = aten.convolution.default(x, weight, None, *window, False, [0, 0], 1)
    return y


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_convolution(window: Any, groups: int) -> None:
    x, weight = given(window[0], groups)
    expected = aten.convolution.default(x, weight, None, *window[1:], False, [0, 0, 0], groups)
    if groups == 1:
        actual = volumes.convolution(x, weight, window[1:], convolve)
    else:
        actual = volumes.convolution_in_groups(x, weight, window[1:], groups)
    torch.testing.assert_close(actual, expected, check_stride=True)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_its_gradients(window: Any) -> None:
    x, weight = given(window[0], 1)
    args = (*window[1:], False, [0, 0, 0], 1)
    gradient = torch.randn_like(aten.convolution.default(x, weight, None, *args))
    for mask in ([True, True, True], [True, False, False], [False, True, False]):
        given_to = gradient, x, weight, [6]
        expected = aten.convolution_backward.default(*given_to, *args, mask)
        actual = volumes.convolution_backward(*given_to, window[1:], mask)
        torch.testing.assert_close(tuple(actual), tuple(expected), check_stride=True)


def test_its_gradients_are_those_of_images() -> None:
    def gradients(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        window = [2, 2, 2], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1
        mask = [True, True, False]
        return aten.convolution_backward.default(y, x, weight, None, *window, mask)

    table: dict[Any, Any] = {**DECOMPOSITIONS}
    y = torch.ones(2, 6, 3, 4, 4, dtype=torch.float64)
    graph = make_fx(gradients, table)(y, *given((3, 3, 3), 1)).graph
    found = [node for node in graph.nodes if "convolution" in str(node.target)]
    assert [node.args[1].meta["tensor_meta"].shape for node in found] == [(6, 12, 8, 7)]

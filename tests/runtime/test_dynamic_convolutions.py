"""Convolutions of any batch, height and width: right at every edge, in one form for all."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.usefixtures("shared_cache")

# Widths around those of strips; the first two differ, so that no size is taken for a constant.
IMAGES = [(2, 20, 24), (3, 17, 33), (2, 21, 9), (5, 19, 16), (2, 24, 7), (2, 9, 40), (4, 15, 65)]
# (kernel, stride, padding, dilation)
WINDOWS = {
    "3x3": (3, 1, 1, 1),
    "strided": (7, 2, 3, 1),
    "without padding": (3, 1, 0, 1),
    "apart": (3, 1, 6, 6),
    "of a row": ((1, 7), 1, (0, 3), 1),
    "next to each other": (2, 2, 0, 1),
    "of one place": (1, 1, 0, 1),
    "with places between": (3, 4, 0, 1),
}


def convolutions(*window: int | tuple[int, int]) -> nn.Module:
    first = nn.Conv2d(5, 16, *window)  # type: ignore[arg-type]
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1, bias=False)).eval()


@pytest.mark.parametrize("name", WINDOWS)
@torch.no_grad()
def test_images_of_any_size(name: str, counts: Counter[str]) -> None:
    model = convolutions(*WINDOWS[name])
    compiled = torch.compile(model, backend="npu_iree", dynamic=True)
    for count, height, width in IMAGES:
        x = torch.randn(count, 5, height, width)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert (counts["graphs"], counts["host_ops"], counts["refused_flags"]) == (1, 0, 0)


@pytest.mark.sweep
@torch.no_grad()
def test_what_is_pooled_and_repeated(cold_counts: Counter[str]) -> None:
    model = nn.Sequential(
        nn.Conv2d(5, 16, 7, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(16, 8, 1),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(8, 8, 3, padding=1),
    ).eval()
    compiled = torch.compile(model, backend="npu_iree", dynamic=True)
    for count, height, width in IMAGES[:4]:
        x = torch.randn(count, 5, height, width)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    found = [cold_counts[name] for name in ("compiles", "host_ops", "refused_flags")]
    assert found == [1, 0, 0]


@torch.no_grad()
def test_batches_of_any_size(counts: Counter[str]) -> None:
    model = convolutions(3, 2, 1)
    compiled = torch.compile(model, backend="npu_iree")
    for count in (3, 2, 8):
        x = torch.randn(count, 5, 28, 28)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert (counts["graphs"], counts["host_ops"], counts["refused_flags"]) == (1, 0, 0)


CONVOLUTIONS = {
    "in groups": lambda: nn.Conv2d(4, 8, 3, stride=2, groups=2),
    "a row": lambda: nn.Conv1d(4, 8, 5, padding=2),
    "a strided row": lambda: nn.Conv1d(4, 8, 3, stride=2, padding=1),
    "images": lambda: nn.Conv2d(4, 8, 3, padding=1),
    "strided images": lambda: nn.Conv2d(4, 8, (3, 2), stride=(2, 3), padding=1),
    "between windows": lambda: nn.Conv2d(4, 8, 1, stride=2, bias=False),
    "apart": lambda: nn.Conv2d(4, 8, 3, padding=2, dilation=2),
    "apart and strided": lambda: nn.Conv2d(4, 8, 3, stride=2, padding=2, dilation=2),
    "of each channel": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "of each channel, strided": lambda: nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4),
    "transposed": lambda: nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1, output_padding=1),
    "tiles": lambda: nn.Conv2d(4, 8, (6, 5), stride=(6, 5)),
    "volumes": lambda: nn.Conv3d(4, 4, 2, stride=(1, 2, 1)),
    "halved thrice": lambda: nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2, padding=1),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False),
        nn.Conv2d(8, 4, 3, padding=1),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_training_on_any_size(name: str, counts: Counter[str]) -> None:
    model = CONVOLUTIONS[name]()
    compiled = torch.compile(model, backend="npu_iree", dynamic=True)
    for count, *sizes in ((2, 20, 11, 9), (3, 17, 24, 8)):
        tensors = [*model.parameters()]
        x = torch.randn(count, 4, *sizes[: tensors[0].dim() - 2], requires_grad=True)
        tensors.append(x)
        expected = model(x)
        gradient = torch.randn_like(expected)
        found = torch.autograd.grad(compiled(x), tensors, gradient)
        wanted = torch.autograd.grad(expected, tensors, gradient)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    assert (counts["graphs"], counts["host_ops"], counts["refused_flags"]) == (2, 0, 0)


@pytest.mark.sweep
@pytest.mark.parametrize("padding", [2, [1, 2]], ids=["alike", "each"])
def test_more_padding_than_a_window_reaches(padding: int | list[int]) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, padding=padding)

    compiled = torch.compile(function, backend="npu_iree", dynamic=True)
    for size in (12, 9):
        args = torch.randn(2, 3, size, size + 4), torch.randn(5, 3, 2, 2)
        tensors = [arg.requires_grad_() for arg in args]
        gradient = torch.randn_like(function(*args))
        found = torch.autograd.grad(compiled(*args), tensors, gradient)
        wanted = torch.autograd.grad(function(*args), tensors, gradient)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


class Block(nn.Module):
    """What ConvNeXt is made of: the sum at its end is of what came in, two products before."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.norm = nn.LayerNorm(16)
        self.wide, self.narrow = nn.Conv2d(16, 64, 1), nn.Conv2d(64, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.narrow(F.gelu(self.wide(y))) + x


@pytest.mark.sweep
@pytest.mark.parametrize("dims", [[0], [0, 2, 3]], ids=["batch", "all"])
@torch.no_grad()
def test_residual_blocks(dims: list[int], counts: Counter[str]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 4, 4), Block(), Block()).eval()
    compiled = torch.compile(model, backend="npu_iree")
    for count, height, width in ((2, 48, 56), (3, 64, 32)) if len(dims) > 1 else ((2, 48, 56),):
        x = torch.randn(count, 3, height, width)
        torch._dynamo.mark_dynamic(x, dims)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert (counts["graphs"], counts["host_ops"], counts["refused_flags"]) == (1, 0, 0)


def pooled(x: torch.Tensor) -> torch.Tensor:
    rows = F.avg_pool2d(x, (2, 1), ceil_mode=True)
    averages = F.avg_pool2d(rows, (1, 2), ceil_mode=True)
    of_one = F.avg_pool2d(x[0], 2).mean() + F.max_pool2d(x[1], 3, 1, 1).mean()
    of_any_length = F.adaptive_avg_pool2d(x, (3, 5)).sin().mean()
    return F.max_pool2d(x.exp(), 3, 2, 1) + averages + of_one + of_any_length


def pooled_to_one(x: torch.Tensor) -> torch.Tensor:
    y = x.contiguous(memory_format=torch.channels_last).relu()
    return F.adaptive_avg_pool2d(y, 1).permute(0, 2, 3, 1).exp()


def repeated(x: torch.Tensor) -> torch.Tensor:
    y = F.avg_pool2d(x, 2)
    square = y.flatten(2).relu().unflatten(2, (y.shape[2], -1))
    return F.interpolate(square, scale_factor=2.0)  # its sizes have squares of sizes in them


@pytest.mark.slow
@pytest.mark.parametrize("function", [pooled, pooled_to_one, repeated])
def test_what_stands_between(
    function: Callable[[torch.Tensor], torch.Tensor], cold_counts: Counter[str]
) -> None:
    compiled = torch.compile(function, backend="npu_iree", dynamic=True)
    for count, size in itertools.product((2, 3), (8, 12, 9)):
        x = torch.randn(count, 4, size, size)
        torch.testing.assert_close(compiled(x), function(x), rtol=1e-4, atol=1e-4)
    assert (cold_counts["compiles"], cold_counts["host_ops"]) == (1, 0)


class Mixed(nn.Module):
    """Puts halves and floats side by side: both are floats then."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(5, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return torch.cat([y.half(), y], 1).relu()


@torch.no_grad()
def test_halves_beside_floats() -> None:
    model = Mixed().eval()
    compiled = torch.compile(model, backend="npu_iree", dynamic=True)
    for width in (24, 33):
        x = torch.randn(3, 5, 20, width)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)


def test_powers_of_tensors_of_one_number() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        numbers = (2.7, torch.int64), (0.1, torch.float64), (3, torch.float32)
        return [x ** torch.scalar_tensor(n, dtype=dtype) for n, dtype in numbers]

    x = torch.tensor(3.0)
    found = torch.compile(function, backend="npu_iree", dynamic=True)(x)
    torch.testing.assert_close(found, function(x))


def test_weights_of_any_size(counts: Counter[str]) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, padding=1).relu() + 1

    compiled = torch.compile(function, backend="npu_iree", dynamic=True)
    for size in (9, 14):
        args = torch.randn(2, 4, size, size + 2), torch.randn(size, 4, 3, 3)
        torch.testing.assert_close(compiled(*args), function(*args), rtol=1e-4, atol=1e-4)
    assert counts["host_ops"] == 0


def test_strides_that_are_asked_for_cost_no_search(cold_counts: Counter[str]) -> None:
    """Such a view is no op of the device's, and no compile is needed to find that out."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return y.as_strided((x.shape[0] - 1, 2), (y.stride(0), 1)).sin()

    compiled = torch.compile(function, backend="npu_iree", dynamic=True)
    x = torch.randn(7, 5)
    torch.testing.assert_close(compiled(x), function(x), rtol=1e-4, atol=1e-4)
    assert cold_counts["compiles"] == 2


@pytest.mark.sweep
def test_the_gradient_of_one_image_by_a_weight_that_is_given(cold_counts: Counter[str]) -> None:
    """All of its sizes are symbols but for the batch; those of the window are made known."""

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, None, stride=2, padding=1)

    compiled = torch.compile(function, backend="npu_iree", dynamic=True)
    for height, places in ((5, 3), (8, 3), (8, 2)):
        x = torch.randn(1, 4, height, 6, requires_grad=True)
        weight = torch.randn(6, 4, places, places, requires_grad=True)
        ours, expected = (
            torch.autograd.grad(f(x, weight).square().sum(), (x, weight))
            for f in (compiled, function)
        )
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert (cold_counts["compiles"], cold_counts["host_ops"]) == (4, 0)  # both ways, of two windows

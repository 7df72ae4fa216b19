"""Convolutions that are written in blocks, of several images or in groups, are as eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional as F

from lowering.cpu import has_here
from tolerances import assert_same

Follow = Callable[[torch.Tensor, torch.Tensor], Any]
# N, C, H, W; F, KH, KW; how the window goes.
WINDOWS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "padded": ((8, 16, 7, 9), (64, 3, 3), {"padding": 1}),
    "by twos": ((4, 3, 14, 11), (64, 3, 3), {"padding": 1, "stride": 2}),
    "apart": ((12, 5, 13, 10), (96, 3, 2), {"padding": (2, 1), "dilation": (2, 3)}),
    "by threes and apart": ((6, 8, 17, 14), (64, 3, 3), {"padding": 2, "stride": 3, "dilation": 2}),
    "larger than its image": ((8, 4, 2, 3), (64, 2, 3), {"padding": (1, 2)}),
    "padded more than it is large": ((4, 16, 5, 6), (64, 2, 2), {"padding": (2, 2)}),
    "not padded": ((8, 16, 9, 8), (64, 3, 3), {}),
    "uneven": ((5, 16, 8, 8), (64, 2, 4), {"padding": "same"}),
    "of seven": ((8, 3, 20, 18), (64, 7, 7), {"padding": 3, "stride": 2}),
    "of one panel": ((8, 16, 7, 7), (32, 3, 3), {"padding": 1}),
    "of one narrow panel": ((6, 5, 7, 9), (16, 3, 3), {"padding": 1, "stride": 2}),
    "of several narrow panels": ((8, 16, 6, 6), (48, 3, 3), {"padding": 1}),
    "of no whole panels": ((8, 16, 6, 6), (40, 3, 3), {"padding": 1}),
    "of a number of images that no block has": ((29, 16, 7, 7), (64, 3, 3), {"padding": 1}),
    "of two images": ((2, 16, 7, 7), (64, 3, 3), {"padding": 1}),
    "in groups": ((2, 16, 7, 8), (32, 3, 3), {"padding": 1, "groups": 2}),
    "in small groups": ((1, 32, 9, 12), (32, 3, 3), {"padding": 1, "stride": 2, "groups": 8}),
    "in large groups": ((4, 6, 7, 10), (96, 3, 2), {"padding": (2, 1), "groups": 2}),
    "in groups, apart": ((1, 20, 8, 7), (32, 2, 3), {"padding": 2, "dilation": 2, "groups": 4}),
    "in groups of many channels": ((1, 256, 6, 5), (256, 3, 3), {"padding": 1, "groups": 2}),
    "in groups of no whole panels": ((2, 9, 6, 6), (15, 3, 3), {"padding": 1, "groups": 3}),
    "in groups of one channel": ((2, 4, 6, 7), (16, 3, 3), {"padding": 1, "groups": 4}),
    "in one-channel groups, of wide panels": ((2, 3, 6, 13), (48, 3, 3), {"groups": 3}),
    "of one channel": ((2, 1, 13, 17), (64, 3, 3), {"padding": 1}),
    "of one channel of one image": ((1, 1, 20, 28), (6, 5, 5), {"padding": 2, "stride": 2}),
    "of one channel and no whole panels": ((8, 1, 9, 11), (20, 3, 2), {"dilation": (1, 2)}),
    "of one feature": ((4, 5, 9, 13), (1, 3, 3), {"padding": 1}),
    "of few features": ((1, 16, 7, 20), (3, 3, 3), {"padding": 1}),
    "of few features, by twos": ((3, 6, 12, 9), (10, 2, 3), {"padding": (0, 1), "stride": 2}),
    "of each channel by itself": ((2, 12, 9, 8), (12, 5, 5), {"stride": 2, "groups": 12}),
}
FOLLOWS: dict[str, Follow] = {
    "the same images": lambda y, x: (y + x).relu(),
    "one number a feature": lambda y, x: y * x[0, :, :1, :1] + x[1, :, 1:2, 1:2],
    "one number an image": lambda y, x: y * x[:, :1, :1, :1],
    "one number a place": lambda y, x: y * x[0, 0],
    "one number": lambda y, x: y * x.amax(),
    "several results": lambda y, x: (y.relu(), (y * 2).permute(0, 2, 3, 1), y > 0),
    "halves": lambda y, x: y.to(torch.bfloat16),
    "its places": lambda y, x: y.permute(0, 2, 3, 1) + torch.arange(y.shape[1]),
    "a product": lambda y, x: y.permute(0, 2, 3, 1) @ x[0, :, 0],
    "sums": lambda y, x: (y.sum((0, 2, 3)), y.softmax(1)),
    "what pads it": lambda y, x: F.pad(y, (1, 2, 0, 1)).relu(),
}
MADE: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "some channels": lambda x, w: (x[:, 8:40], w),
    "the last of channels last": lambda x, w: (
        x.permute(0, 2, 3, 1).contiguous().relu()[..., 16:].permute(0, 3, 1, 2),
        w,
    ),
    "widened": lambda x, w: (x[:, :32].bfloat16().float(), w.to(torch.int8).float()),
    "ones": lambda x, w: (torch.ones(8, 32, 5, 6), w),
    "one image again and again": lambda x, w: (x[:1, :32].expand(8, -1, -1, -1), w),
    "one panel": lambda x, w: (x[:, :32], w[:32]),
    "some features": lambda x, w: (torch.cat([x, x])[4:12, :32], torch.cat([w, w])[32:96]),
    "padded before at its end": lambda x, w: (
        F.pad(F.conv2d(x[:, :32], w[:32]).relu(), (0, 1, 0, 1)),
        w,
    ),
    "flipped": lambda x, w: (x[:, 16:].flip(2), w.flip(0)),
}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="npu_iree", options={"fallback": "error"})


def whole_numbers(*sizes: int) -> torch.Tensor:
    """Numbers whose products have the same sum in any order."""
    return torch.randint(-3, 4, sizes).float()


@pytest.mark.slow
@pytest.mark.parametrize("names", [[*WINDOWS][i::5] for i in range(5)], ids=", ".join)
def test_windows_and_their_gradients(names: list[str]) -> None:
    given = {}
    for name in names:
        sizes, (features, *kernel), window = WINDOWS[name]
        weight = whole_numbers(features, sizes[1] // window.get("groups", 1), *kernel)
        given[name] = [whole_numbers(*sizes), weight, whole_numbers(features)]

    def convolve(given: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: F.conv2d(*given[name], **WINDOWS[name][2]).relu() for name in names}

    def with_gradients(function: Callable[..., Any]) -> list[Any]:
        leaves = {name: [v.clone().requires_grad_() for v in of] for name, of in given.items()}
        found = function(leaves)
        sum((y * torch.arange(y.shape[1])[:, None, None]).sum() for y in found.values()).backward()
        gradients = {name: [leaf.grad for leaf in of] for name, of in leaves.items()}
        return [{name: y.detach() for name, y in found.items()}, gradients]

    fast = compiled(convolve)
    assert_same(fast(given), convolve(given))
    assert_same(with_gradients(fast), with_gradients(convolve))
    assert not counters["npu_iree"]["refused_flags"]


@pytest.mark.parametrize("follow", FOLLOWS)
def test_what_follows_is_computed_on_tiles_or_by_itself(follow: str) -> None:
    x, weight = torch.randn(8, 64, 6, 5), torch.randn(64, 64, 3, 3) / 24

    def convolve(x: torch.Tensor, weight: torch.Tensor) -> Any:
        y = F.conv2d(F.conv2d(x, weight, padding=1).relu(), weight, padding=1)
        return FOLLOWS[follow](y, x)

    assert_same(compiled(convolve)(x, weight), convolve(x, weight))
    assert not counters["npu_iree"]["refused_flags"]


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("made", MADE)
def test_images_and_weights_are_read_wherever_they_lie(made: str, padding: int) -> None:
    x, weight = whole_numbers(8, 48, 6, 7), whole_numbers(64, 32, 3, 3)

    def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(*MADE[made](x, weight), padding=padding)

    assert_same(compiled(convolve)(x, weight), convolve(x, weight))
    assert not counters["npu_iree"]["refused_flags"]


def test_what_is_not_finite_stays_where_a_window_sees_it() -> None:
    x, weight = torch.randn(8, 16, 7, 7), torch.randn(64, 16, 3, 3)
    x[0, 0, 0, 0], x[1, 0, 3, 3], x[2, 1, 6, 6] = float("inf"), float("nan"), -float("inf")

    def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, padding=1)

    fast = compiled(convolve)
    assert_same(fast(x, weight), convolve(x, weight))
    if has_here(("avx2", "fma")) and not has_here(("amx-tile",)):
        weight[0, 0, 0, 0] = float("inf")  # which is not multiplied by zeros of the padding
        assert_same(fast(x, weight), convolve(x, weight))


def test_a_weight_that_changes_is_packed_anew() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 64, 3, padding=1), torch.nn.ReLU()).eval()
    fast, x = compiled(model), torch.randn(8, 16, 7, 7)
    with torch.no_grad():
        for _ in range(3):
            assert_same(fast(x), model(x))
            model[0].weight.mul_(1.5)


def test_images_of_known_and_unknown_numbers() -> None:
    """A block is of a known number of images, or of places of a row; else, rows are strips."""
    weight, of_groups = torch.randn(64, 16, 3, 3), torch.randn(32, 8, 3, 3)
    of_one, of_few = torch.randn(16, 1, 3, 3), torch.randn(5, 16, 3, 3)

    def convolve(x: torch.Tensor) -> list[torch.Tensor]:
        grouped = F.conv2d(x, of_groups, x.new_ones(32), padding=1, groups=2)
        sums = (grouped + x.mean((1, 2, 3), keepdim=True)).relu()
        few = F.conv2d(x, of_few).tanh(), F.conv2d(x[:, :1], of_one, stride=2)
        return [F.conv2d(x, weight, padding=1).relu(), sums, grouped.softmax(1), *few]

    fast = compiled(convolve)
    for count in (8, 4, 7):
        x = torch.randn(count, 16, 7, 7)
        assert_same(fast(x), convolve(x))

"""Between forward and backward, images lie as they are computed, and gradients are eager's."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from npu_iree.targets import NPU_LOCAL

pytestmark = pytest.mark.usefixtures("shared_cache")


class Images(nn.Module):
    """A network of each kind of op that channels last go through."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.down = nn.Conv2d(16, 32, 3, 2, 1)
        self.by_channel = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.last = nn.Conv2d(16, 32, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(self.norm(self.one(x)).relu(), 3, 2, 1)
        z = self.last(y) + self.by_channel(F.silu(self.down(y)))
        return z.relu().mean((2, 3))


@dataclass(frozen=True)
class Step:
    """What a step of training gives: what it saves, and all that it computes."""

    saved: list[torch.Tensor]
    found: list[torch.Tensor]


def step(model: nn.Module, function: Callable[..., Any], x: torch.Tensor) -> Step:
    saved = list[torch.Tensor]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = x.clone().requires_grad_()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(x)
    weight = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    (result * weight).sum().backward()
    return Step(saved, [result.detach(), x.grad, *(p.grad for p in model.parameters())])


def steps(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> list[Step]:
    """Give steps of this backend, and see that they are eager's."""
    eager = copy.deepcopy(model)
    compiled, found = torch.compile(model, backend="npu_iree", **options), []
    for x in inputs:
        for one in (model, eager):
            one.zero_grad()
        found.append(step(model, compiled, x))
        for ours, theirs in zip(found[-1].found, step(eager, eager, x).found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    return found


def channels(found: Step, x: torch.Tensor) -> set[int]:
    """Give the channels of the images that are saved with channels last."""
    saved = [t for t in found.saved if t.ndim == x.ndim and t.shape[0] == x.shape[0]]
    lasts = [t for t in saved if t.movedim(1, -1).is_contiguous() and not t.is_contiguous()]
    return {t.shape[1] for t in lasts}


@pytest.mark.sweep
@pytest.mark.parametrize("count", [4, 7])
def test_images_are_saved_with_channels_last(count: int, counts: Counter[str]) -> None:
    torch.manual_seed(0)
    x = torch.randn(count, 3, 12, 20)
    (found,) = steps(Images(), x)
    assert channels(found, x) == {16, 32}
    assert counts["host_ops"] == counts["refused_flags"] == 0


@pytest.mark.sweep
def test_sums_of_images_are_saved_as_they_are() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv2d(3, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.one(x)
            y = y * y.sum((0, 2, 3)).cos().view(-1, 1, 1) + y.mean(1, keepdim=True)
            return y * y.sum((2, 3)).sin()[..., None, None] + y.mean((1, 2)).exp().mean()

    torch.manual_seed(0)
    x = torch.randn(4, 3, 7, 9)
    (found,) = steps(Sums(), x)
    assert channels(found, x) == {8}
    assert (8,) in {tuple(t.shape) for t in found.saved}


@pytest.mark.sweep
def test_of_any_size() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 8, 3))
    one, other = torch.randn(4, 3, 6, 10), torch.randn(5, 3, 9, 7)
    for x, found in zip((one, other), steps(model, one, other, dynamic=True), strict=True):
        assert channels(found, x) == {16}


def test_volumes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(3, 16, 2), nn.GELU(), nn.Conv3d(16, 8, 1))
    x = torch.randn(4, 3, 4, 5, 6)
    (found,) = steps(model, x)
    assert channels(found, x) == {16}


def test_what_the_host_reads_has_channels_first(counts: Counter[str]) -> None:
    torch.manual_seed(0)
    one, two = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1)
    disabled = ["aten.view", "aten.sigmoid_backward", "aten.mul.Tensor"]

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = one, two

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.one(x).sigmoid()
            return self.two(y * y.flatten(1).view(y.shape))

    steps(Seen(), torch.randn(4, 3, 8, 8), options={"disabled_ops": disabled})
    assert counts["host_ops"] > 0


@pytest.mark.sweep
def test_a_target_without_channels_last_saves_what_pytorch_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    rewrites = tuple(name for name in NPU_LOCAL.compile.rewrites if name != "channels_last")
    compiled = replace(NPU_LOCAL.compile, name="channels-first", rewrites=rewrites)
    target = replace(NPU_LOCAL, compile=compiled)
    table = import_module("npu_iree.targets")  # `npu_iree.targets` is the function
    monkeypatch.setattr(table, "targets", lambda: {t.name: t for t in (NPU_LOCAL, target)})
    x = torch.randn(4, 3, 6, 10)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 8, 3))
    for name, lasts in ((NPU_LOCAL.name, {16}), (target.name, set[int]())):
        (found,) = steps(copy.deepcopy(model), x, options={"target": name})
        assert channels(found, x) == lasts

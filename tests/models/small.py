"""Small models, each with one thing that a call of an artifact must get right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from npu_iree.offline.build import BuildOptions, write_artifact

_IRPA = BuildOptions()
LENGTH = 6  # of the caches


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Named:
    """Written down by another name than its own."""

    one: Any
    two: Any


pytree.register_dataclass(Named, serialized_type_name="a.name.of.its.own")


class Unknown(NamedTuple):
    """Registered here, and not where the artifact is loaded: there it is a plain tuple or dict."""

    one: torch.Tensor
    two: torch.Tensor


for _kind in (Point, Unknown):
    pytree._register_namedtuple(_kind, serialized_type_name=f"models.small.{_kind.__name__}")


@dataclass(frozen=True)
class SmallModel:
    """A model and a call of it.

    Attributes:
        model: the module.
        args: of the call that it is exported with.
        kwargs: of the same.
        dynamic: sizes that may change, as torch.export wants them.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic: Any = None

    def export(self) -> ExportedProgram:
        with torch.no_grad():
            return torch.export.export(
                self.model, self.args, dict(self.kwargs), dynamic_shapes=self.dynamic
            )


class Nested(nn.Module):
    def forward(self, batch: dict[str, Any], point: Point) -> dict[str, Any]:
        first, (second, third) = batch["first"], batch["rest"]
        return {
            "sum": first + second,
            "deep": (third * 2, [point.x - point.y]),
            "point": Point(point.y, point.x + 1),
            "unknown": Unknown(first * 3, second * 3),
            "levels": {1: first, 0: second},
        }


class Outputs(nn.Module):
    """Results that no device computes."""

    def forward(self, x: torch.Tensor, n: int, flag: bool) -> tuple[Any, ...]:
        y = x * n if flag else x
        return x, None, 7, x.shape[0], 2 * x.shape[0] + 1, y, 1.5, True, x.shape[0] ** 2


class Keywords(nn.Module):
    def forward(
        self, x: torch.Tensor, y: torch.Tensor, *, scale: torch.Tensor, shift: Any = None
    ) -> torch.Tensor:
        return (x - y) * scale + (0 if shift is None else shift)


class Dtypes(nn.Module):
    def forward(
        self,
        double: torch.Tensor,
        long: torch.Tensor,
        mask: torch.Tensor,
        half: torch.Tensor,
        wave: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        return double / 3, long + 2**40, ~mask, half * 3, wave * wave, torch.where(mask, long, -1)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(image))


class Unsigned(nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return (image.float() / 2).to(torch.uint8)


class ZeroD(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, (x * torch.ones(3)).sum(0)


class WritesInput(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x * 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


class Constants(nn.Module):
    """A buffer that no state_dict has, a tensor that is no buffer at all, and a plain parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(6.0).view(2, 3), persistent=False)
        self.free = torch.tensor([1.0, 2.0, 3.0])
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.mask + self.free * self.scale, self.scale


class Cache(nn.Module):
    """Keys at their positions, and how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(LENGTH, 4))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.project = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_copy_(0, self.count, self.project(x))
        self.count.add_(1)
        return self.keys.sum(0), self.count * 1


class Peek(nn.Module):
    """What another entry point has written, as it is."""

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.register_buffer("keys", cache.keys)
        self.register_buffer("count", cache.count)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.keys, self.count, x + self.count


class Net(nn.Module):
    """A small model with parameters of several shapes and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.rand(3).double() + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) * self.scale.float()


class CopiesIn(nn.Module):
    """One argument becomes the other; what it was is returned too."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = x.clone()
        x.copy_(y)
        return before, x + 1


class Remembers(nn.Module):
    """States become arguments and each other, as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("first", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        change = x - self.last
        before = self.first.clone()
        self.first.copy_(self.last)
        self.last.copy_(x)
        return change, before


class SetsTwo(nn.Module):
    """Two states and a result are one value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.zeros(3))
        self.register_buffer("two", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2 + self.one - self.two
        self.one.copy_(y)
        self.two.copy_(y)
        return y


class Rows(nn.Module):
    """A cache that no `state_dict` has, and that lies in another order than its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("rows", torch.zeros(4, 6).t(), persistent=False)

    def forward(self, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.rows.scatter_add_(0, index, self.layer(x))
        return self.rows.sum(1)


class ReadsRows(nn.Module):
    """The same tensors under other names."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.inner = rows

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.inner.rows, self.inner.rows.unsqueeze(0), self.inner.layer(x)


class Pairs(nn.Module):
    """A size that must be even."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 2, 4).sum(1)


class Halves(nn.Module):
    """The first size is twice the second."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.view(y.shape[0], 2, 4).sum(1) + y


class Counted(nn.Module):
    """A whole number that is also a size, one that is none, and what is computed of them."""

    def forward(self, x: torch.Tensor, n: int, step: int) -> tuple[Any, ...]:
        return x + torch.arange(n) * step, n / 2, n // 2 + step


class Odd(nn.Module):
    """One program for even sizes, another for odd ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x + 1


class Bits(nn.Module):
    """A size of which a bit decides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] & 1 == 0 else x + 1


class Squeezed(nn.Module):
    """The first size is left out where it is 1, and only there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(-1).squeeze() * 2


def seeded(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def compiled(models: Mapping[str, SmallModel], path: Path, options: BuildOptions = _IRPA) -> Path:
    """Compile models as entry points of one artifact."""
    write_artifact({name: model.export() for name, model in models.items()}, path, options)
    return path


def signatures() -> dict[str, SmallModel]:
    """Models that share no parameter: entry points of one artifact."""
    torch.manual_seed(0)
    batch = {"first": seeded(2, 3), "rest": (seeded(2, 3), seeded(4))}
    image = seeded(2, 3, 8, 8).to(memory_format=torch.channels_last)
    wave = torch.complex(seeded(3), seeded(3).flip(0))
    mask, size = torch.tensor([True, False, True]), Dim("size", min=1, max=9)
    return {
        "nested": SmallModel(Nested(), (batch, Point(seeded(2), seeded(2, 1)))),
        "outputs": SmallModel(
            Outputs(), (seeded(5, 2), 3, True), dynamic={"x": {0: size}, "n": None, "flag": None}
        ),
        "keywords": SmallModel(
            Keywords(), (seeded(3),), {"y": seeded(4)[1:], "scale": torch.tensor(2.0)}
        ),
        "dtypes": SmallModel(
            Dtypes(),
            (seeded(3).double(), torch.tensor([1, -5, 9]), mask, seeded(3).bfloat16(), wave),
        ),
        "channels_last": SmallModel(ChannelsLast(), (image,)),
        "unsigned": SmallModel(Unsigned(), (torch.tensor([255, 200, 3, 128], dtype=torch.uint8),)),
        "zero_d": SmallModel(ZeroD(), (torch.tensor(2.5),)),
        "writes_input": SmallModel(WritesInput(), (seeded(3), seeded(3, 1).view(3))),
        "tied": SmallModel(Tied(), (torch.tensor([[1, 2, 9]]),)),
        "constants": SmallModel(Constants(), (seeded(2, 3),)),
    }


def sized() -> dict[str, SmallModel]:
    """Models whose sizes are not only symbols."""
    half, any_ = Dim("half", min=2, max=16), Dim.DYNAMIC
    counted = {"x": {0: any_}, "n": any_, "step": Dim.DYNAMIC(min=3, max=8)}
    return {
        "derived": SmallModel(Pairs(), (seeded(8, 4),), dynamic=({0: 2 * half},)),
        "hinted": SmallModel(Pairs(), (seeded(8, 4),), dynamic=({0: any_},)),
        "late": SmallModel(
            Halves(), (seeded(8, 4), seeded(4, 4)), dynamic=({0: 2 * half}, {0: half})
        ),
        "counted": SmallModel(Counted(), (seeded(5), 5, 4), dynamic=counted),
        "odd": SmallModel(Odd(), (seeded(5),), dynamic=({0: any_},)),
        "bits": SmallModel(Bits(), (seeded(6),), dynamic=({0: any_},)),
        "squeezed": SmallModel(Squeezed(), (seeded(7, 1, 3),), dynamic=({0: Dim("b", min=1)},)),
    }


def cached() -> dict[str, SmallModel]:
    """A cache, and a look into it."""
    torch.manual_seed(0)
    cache = Cache()
    return {
        "step": SmallModel(cache, (seeded(1, 4),)),
        "peek": SmallModel(Peek(cache), (seeded(1),)),
    }

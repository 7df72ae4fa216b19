"""Two pieces of a value put together, the first negated: halves exchanged, or any others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")
GENERATOR = torch.Generator().manual_seed(0)


def rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def other_pieces(x: torch.Tensor) -> Sequence[torch.Tensor]:
    first, second = x.chunk(2, -1)
    return (
        torch.cat((-first, second), -1),
        torch.cat((-second, second), -1),
        torch.cat((-first, first), -1),
        torch.cat((-x[..., 1:5], first), -1),
        torch.cat((second, -first), -1),
    )


def with_strides(x: torch.Tensor) -> Sequence[torch.Tensor]:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.cat((-odd, even), -1), torch.stack((-odd, even), -1).flatten(-2)


def in_part(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The pieces are not all there is."""
    y = x.exp()
    y[..., :2], y[..., 2:4] = -x[..., 2:4], x[..., :2]
    return torch.cat((-x[..., 2:4], x[..., :2], x[..., 4:]), -1), y


def in_other_dtypes(x: torch.Tensor) -> Sequence[torch.Tensor]:
    pieces = [x.to(dtype).chunk(2, -1) for dtype in (torch.float64, torch.float16, torch.bfloat16)]
    return [torch.cat((-first, second), -1) for first, second in pieces]


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "halves": lambda x: (rotated(x), rotated(x.exp())),
    "other pieces": other_pieces,
    "strides": with_strides,
    "in part": in_part,
    "dtypes": in_other_dtypes,
}


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_pieces_stay_what_they_are(name: str, is_dynamic: bool) -> None:
    function = FUNCTIONS[name]
    compiled = torch.compile(
        function, backend="npu_iree", dynamic=is_dynamic, options={"fallback": "error"}
    )
    for shape in [(3, 5, 8), (2, 4, 8)] if is_dynamic else [(3, 5, 8)]:
        x = torch.randn(shape, generator=GENERATOR)
        assert_same(compiled(x), function(x))


class Rotary(torch.nn.Module):
    """Rotary embeddings of the last tokens, as of a vision transformer with registers."""

    def __init__(self, has_heads: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(32, 32)
        self.has_heads = has_heads

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.has_heads:
            y = y.view(x.shape[0], x.shape[1], 4, 8).transpose(1, 2)
        registers, patches = y.split((y.shape[-2] - cos.shape[0], cos.shape[0]), -2)
        return torch.cat((registers, patches * cos + rotated(patches) * sin), -2)


@pytest.mark.parametrize("has_heads", [False, True], ids=["rows", "heads"])
def test_rows_that_were_cut_are_rotated(has_heads: bool) -> None:
    module, width = Rotary(has_heads), 8 if has_heads else 32
    compiled = torch.compile(
        module, backend="npu_iree", dynamic=True, options={"fallback": "error"}
    )
    with torch.no_grad():
        for batch, tokens, patches in [(3, 28, 25), (2, 52, 30), (5, 9, 3)]:
            x = torch.randn(batch, tokens, 32, generator=GENERATOR)
            cos, sin = torch.randn(2, patches, width, generator=GENERATOR)
            x = x if has_heads else x[0]
            assert_same(compiled(x, cos, sin), module(x, cos, sin))

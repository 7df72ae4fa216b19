"""Results that are views of arguments lie where eager's do, though their places depend on sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("shared_cache")


def written(x: torch.Tensor) -> Any:
    x.add_(1)
    return x[x.shape[0] // 2 :]


def flattened(x: torch.Tensor) -> Any:
    flat = x.view(-1)
    flat.add_(1)
    return flat[x.shape[0] // 2 :], x[x.shape[0] - 2 :]


def transposed(x: torch.Tensor) -> Any:
    turned = x.t()
    turned.mul_(2)
    return turned[:, x.shape[0] // 2 :], turned.unsqueeze(0)[0, :, x.shape[0] - 1]


def half_written(x: torch.Tensor) -> Any:
    first, second = x.chunk(2)
    first.zero_()
    return second


def row_written(x: torch.Tensor) -> Any:
    x[1:].mul_(3)
    x[-1].add_(x[0])
    return x[1:][x.shape[0] // 2 :], x[x.shape[0] // 2]


def narrowed(x: torch.Tensor, first: int) -> Any:
    x.mul_(2)
    return x.narrow(0, first, 2)


def not_written(x: torch.Tensor) -> Any:
    return x[x.shape[0] // 2 :], (x * 2).sum()


FUNCTIONS = (written, flattened, transposed, half_written, row_written, narrowed, not_written)
LAYOUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "dense": lambda rows: torch.arange(rows * 4.0).reshape(rows, 4),
    "turned": lambda rows: torch.arange(rows * 4.0).reshape(4, rows).t(),
    "in the middle": lambda rows: torch.arange((rows + 6) * 4.0).reshape(-1, 4)[2 : rows + 2],
    "with gaps": lambda rows: torch.arange(rows * 8.0).reshape(rows, 8)[:, 2:6],
}


CASES = [
    (function, layout)
    for function in FUNCTIONS
    for layout in LAYOUTS
    if function is not flattened or layout in ("dense", "in the middle")
]


def outcome(function: Callable[..., Any], x: torch.Tensor, *numbers: int) -> Any:
    """What a call returns, and where in the memory of the argument it lies."""
    results = function(x, *numbers)
    several = results if isinstance(results, tuple) else (results,)
    views = [r for r in several if r.dim()]
    assert all(r.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for r in views)
    places = [(r.shape, r.stride(), r.storage_offset()) for r in views]
    return [r.tolist() for r in several], places, x.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("function", "layout"), CASES)
def test_views_of_arguments(function: Callable[..., Any], layout: str) -> None:
    compiled = torch.compile(function, backend="npu_iree", dynamic=True)
    numbers = (3,) if function is narrowed else ()
    for rows in (6, 9):
        expected = outcome(function, LAYOUTS[layout](rows), *numbers)
        assert outcome(compiled, LAYOUTS[layout](rows), *numbers) == expected


def test_gradients_of_a_view_of_what_is_written() -> None:
    def function(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        x.mul_(factor)
        return x[x.shape[0] // 2 :]

    compiled = torch.compile(function, backend="npu_iree", dynamic=True)
    found = []
    for run in (function, compiled):
        leaf, factor = torch.arange(6.0, requires_grad=True), torch.tensor(3.0)
        result = run(leaf * 1, factor)
        (result * torch.tensor([1.0, 2.0, 4.0])).sum().backward()
        assert leaf.grad is not None
        found.append((result.tolist(), leaf.grad.tolist()))
    assert found[0] == found[1]

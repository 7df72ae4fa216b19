"""Products of matrices of any number of rows, and what is computed of them: as eager has it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, layer_norm

from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")

# Fewer than the rows of a block, as many, some more; those of several work items.
ROWS = [33, 12, 13, 11, 4, 5, 3, 2, 24, 128, 513, 700, 1030]


def followers(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, row: torch.Tensor, column: torch.Tensor
) -> Any:
    """Of [M, K], [K, N], [M, N], [M, 1] and [N]."""
    a = x @ w
    return (
        gelu(a + column) + y,
        torch.relu(a * row) - y * column,
        a / x.shape[0] + 2,
        torch.where(y > 0, a, y),
        (a + column).to(torch.bfloat16),
        torch.softmax(a, -1),
        layer_norm(a + y, column.shape, column),
        a.sum(0),
    )


@pytest.mark.parametrize(("depth", "columns"), [(96, 128), (7, 64), (512, 96), (40, 32)])
def test_products_of_any_number_of_rows(depth: int, columns: int, counts: Counter[str]) -> None:
    torch.manual_seed(0)
    w, column = torch.randn(depth, columns) / depth**0.5, torch.randn(columns)
    compiled = torch.compile(followers, backend="npu_iree", dynamic=True)
    for rows in ROWS:
        x, y, row = torch.randn(rows, depth), torch.randn(rows, columns), torch.randn(rows, 1)
        for tensor, dims in ((x, (1,)), (w, (0, 1)), (y, (1,)), (column, (0,))):
            torch._dynamo.mark_static(tensor, dims)
        args = x, w, y, row, column
        assert_same(compiled(*args), followers(*args))
    assert counts["graphs"] == 1
    assert counts["refused_flags"] == counts["host_ops"] == 0


def test_rows_may_be_one_or_none(counts: Counter[str]) -> None:
    layer = nn.Linear(40, 64)
    compiled = torch.compile(lambda x: torch.relu(layer(x)), backend="npu_iree")
    with torch.no_grad():
        for rows in (5, 1, 0, 30, 0, 1):
            x = torch.randn(rows, 40)
            torch._dynamo.decorators.mark_unbacked(x, 0)
            assert_same(compiled(x), torch.relu(layer(x)))
    assert counts["refused_flags"] == 0


@pytest.mark.parametrize("rows", [3, 13, 100])
def test_what_is_no_number_stays_in_its_row(rows: int) -> None:
    layer = nn.Linear(48, 64)
    compiled = torch.compile(layer, backend="npu_iree", dynamic=True)
    x = torch.randn(rows, 48)
    x[0, 1], x[rows // 2, 2], x[-1, 3] = math.nan, math.inf, -math.inf
    with torch.no_grad():
        assert_same(compiled(x), layer(x))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x, w: x.t() @ w, (48, 17)),
        (lambda x, w: torch.relu(x).t() @ w, (48, 17)),
        (lambda x, w: torch.relu(x.t() @ w) + 1, (48, 17)),
        (lambda x, w: x.permute(0, 2, 1).reshape(-1, 48) @ w, (1, 48, 17)),
        (lambda x, w: torch.relu(x[0].flatten(1).t() @ w), (1, 48, 5, 6)),
        (lambda x, w: x.flatten(2).transpose(1, 2) @ w, (2, 48, 5, 6)),
        (lambda x, w: torch.relu(x.t().contiguous() @ w) + x.t()[:, :1], (48, 17)),
    ],
)
def test_rows_that_lie_as_columns(
    function: Callable[..., Any], shape: tuple[int, ...], counts: Counter[str]
) -> None:
    w = torch.randn(48, 64) / 7
    torch._dynamo.mark_static(w)
    compiled = torch.compile(function, backend="npu_iree", dynamic=True)
    for more in (0, 13):
        x = torch.randn(*shape[:-1], shape[-1] + more)
        torch._dynamo.mark_static(x, shape.index(48))
        assert_same(compiled(x, w), function(x, w))
    assert counts["graphs"] == 1
    assert counts["refused_flags"] == 0


@pytest.mark.sweep
def test_gradients_of_any_number_of_rows(counts: Counter[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))
    compiled = torch.compile(model, backend="npu_iree", dynamic=True)
    for rows in (20, 7, 130):
        x = torch.randn(rows, 32, requires_grad=True)
        inputs = [x, *model.parameters()]
        found = torch.autograd.grad(compiled(x).square().sum(), inputs)
        assert_same(found, torch.autograd.grad(model(x).square().sum(), inputs))
    assert counts["refused_flags"] == 0


def half(y: torch.Tensor) -> torch.Tensor:
    return y.chunk(2, -1)[0]


def one_of_two(y: torch.Tensor) -> torch.Tensor:
    return y.reshape(y.shape[0], y.shape[1], 2, 64)[:, :, 1]


@pytest.mark.parametrize("part", [half, one_of_two])
def test_part_of_a_product_scales_another_value(
    part: Callable[[torch.Tensor], torch.Tensor], cold_counts: Counter[str]
) -> None:
    project = nn.Linear(32, 128, bias=False)
    compiled = torch.compile(lambda x, y: x * part(project(y)), backend="npu_iree", dynamic=True)
    with torch.no_grad():
        for rows in (11, 5):
            x, y = torch.randn(3, rows, 64), torch.randn(3, rows, 32)
            assert_same(compiled(x, y), x * part(project(y)))
    assert (cold_counts["compiles"], cold_counts["refused_flags"]) == (1, 0)

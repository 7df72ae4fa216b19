"""What is rewritten for the target computes what eager does, gradients too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lowering.cpu import CPU_FLAG, missing_features
from tolerances import assert_same

ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, 0),
    "amax": lambda x: x.amax(-1),
    "argmax": lambda x: x.argmax(-1),
    "sum": lambda x: x.sum(-1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
}


@pytest.mark.parametrize("length", [1, 17, 197])
def test_rows_that_no_vector_divides(length: int) -> None:
    x = torch.randn(5, length)
    x[1, -1], x[2, 0], x[3], x[4] = float("nan"), float("inf"), -float("inf"), float("inf")

    def reduce(x: torch.Tensor) -> list[torch.Tensor]:
        return [reduction(x) for reduction in ROWS.values()]

    compiled = torch.compile(reduce, backend="npu_iree", options={"fallback": "error"})
    assert_same(compiled(x), reduce(x))


@pytest.mark.slow
def test_convolutions_along_one_dimension_and_their_gradients() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv1d(3, 6, 3, stride=2, padding=1),
        torch.nn.Conv1d(6, 6, 4, dilation=2, padding=3, groups=6),
        torch.nn.GELU(),
    )
    compiled = torch.compile(model, backend="npu_iree", options={"fallback": "error"})
    given = torch.randn(2, 3, 37)
    results = []
    for call in (model, compiled):
        model.zero_grad()
        x = given.clone().requires_grad_()
        y = call(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in model.parameters())])
    assert_same(results[1], results[0])


@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1), (3, 40), (1, 16), (16, 16), (33, 17), (67, 48), (130, 1024)]
)
def test_products_of_one_row_of_any_size(rows: int, width: int) -> None:
    model = torch.nn.Linear(width, rows)
    with torch.no_grad():
        model.weight[0, 0], model.weight[-1, -1] = float("nan"), float("inf")
    compiled = torch.compile(model, backend="npu_iree", options={"fallback": "error"})
    x = torch.randn(1, width)
    with torch.no_grad():
        assert_same(compiled(x), model(x))


@pytest.mark.parametrize(
    ("stack", "rows", "width", "columns"),
    [
        ((), 2, 1, 32),
        ((), 13, 17, 64),
        ((), 25, 300, 96),
        ((3,), 12, 5, 32),
        ((2, 2), 11, 64, 160),
        ((1,), 50, 7, 16),
    ],
)
@pytest.mark.parametrize("cpu", ["host", "haswell"])
def test_products_in_panels(
    cpu: str, stack: tuple[int, ...], rows: int, width: int, columns: int
) -> None:
    if missing_features(["avx2", "fma"]):
        pytest.skip("no code for this CPU")
    x, w, start = (
        torch.randn(*stack, *shape) for shape in ((rows, width), (columns, width), (width, columns))
    )
    x[..., 0, 0], w[..., -1, -1], start[..., 0, 1] = float("nan"), float("inf"), -float("inf")

    def products(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        return [(x @ w.mT).relu() + 1, x @ v, (x + x) @ v.mT.contiguous().mT]

    compiled = torch.compile(
        products,
        backend="npu_iree",
        options={"fallback": "error", "flags": [CPU_FLAG + cpu]},
    )
    assert_same(compiled(x, w, start), products(x, w, start))


def test_grouped_queries_and_one_written_row_of_a_cache() -> None:
    """A step of decoding: each key serves several queries, and one of each head's rows is new."""
    query, new = torch.randn(2, 6, 1, 8), torch.randn(2, 3, 1, 8)

    def step(cache: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(2, place, new)
        cache[:, :, place] += 1
        keys = cache[:, :, None].expand(2, 3, 2, 20, 8).reshape(2, 6, 20, 8)
        return torch.nn.functional.scaled_dot_product_attention(query, keys, keys)

    compiled = torch.compile(step, backend="npu_iree", options={"fallback": "error"})
    for place in (0, 19, -1):
        caches = [torch.zeros(2, 3, 20, 8) + torch.arange(20.0).view(20, 1) for _ in range(2)]
        index = torch.tensor([place % 20])
        expected = step(caches[0], index)
        assert_same(compiled(caches[1], index), expected)
        assert_same(caches[1], caches[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (7, 13), (300, 64), (9, 20000)])
def test_rows_that_are_put_where_an_index_says(count: int, width: int, dtype: torch.dtype) -> None:
    index = torch.randint(0, 9, (count,))
    places = torch.randperm(9)[:count]
    y = torch.randint(-9, 9, (count, width)).to(dtype)
    y[-1, 0], y[0, -1] = float("nan"), float("inf")

    def put(index: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        x, rows = torch.ones(9, width, dtype=dtype), index[:, None].expand(-1, width)
        return [
            x.index_add(0, index, y),
            *(x.scatter_reduce(0, rows, y, kind) for kind in ("amax", "amin")),
            torch.index_put(x, [index], y[:1].expand(count, -1)),
            x.index_copy(0, places, y[: len(places)]),
        ]

    compiled = torch.compile(put, backend="npu_iree")
    assert_same(compiled(index, y), put(index, y))

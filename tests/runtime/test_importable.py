"""Ops that torch-mlir refuses, or lowers wrongly, in the form in which they are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 6, generator=GENERATOR)
TIES = torch.randint(0, 4, (40, 3), generator=GENERATOR)


def scaled(x: torch.Tensor) -> Any:
    """A complex tensor and numbers, as rotary embeddings have them."""
    turned = torch.polar(torch.ones_like(x), x)
    return torch.view_as_real(turned * 1.5), torch.view_as_real((2 - 1j) * turned)


def written_by_steps(x: torch.Tensor) -> Any:
    """What is written into is not dense in the order of its dimensions."""
    result, state = x.t().contiguous().t().clone(), x.new_zeros(x.shape[0])
    for i in range(x.shape[1]):
        state = state * 0.5 + x[:, i]
        result[:, i] = state
    return result @ result.mT


def by_short_indices(x: torch.Tensor) -> Any:
    """Indices of 32 bits alone, beside others, and beside those of whole dimensions."""
    index = torch.tensor([1, -2, 1], dtype=torch.int32)
    put = torch.ops.aten.index_put(x * 1, [None, index], x[:, :3], True)
    return x[:, index] * 2, x[torch.arange(-3, 0)[:, None], torch.arange(4).int()], put * 2


FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "stable sort": (lambda x: torch.sort(x, stable=True, dim=0), TIES),
    "stable sort, descending": (lambda x: x.sort(dim=0, stable=True, descending=True), TIES),
    "stable sort of a number": (lambda x: torch.sort(x.sum(), stable=True), X),
    "largest, in any order": (lambda x: x.topk(4, sorted=False)[0].sum(-1), X),
    "short indices": (by_short_indices, X),
    "complex": (scaled, X),
    "rolled": (lambda x: (x.roll((7, -9), (1, 0)), x.roll(40), x.roll((1, 6), (0, 0))), X),
    "steps": (written_by_steps, X),
    "one window": (lambda x: x.unfold(0, 4, 2).sum(-1), X),
    "windows": (
        lambda x: torch.ops.aten.unfold_backward(x.unfold(1, 3, 2), x.shape, 1, 3, 2), X
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_runs_on_the_host(name: str, is_dynamic: bool) -> None:
    function, x = FUNCTIONS[name]
    options = {"fallback": "error"}
    compiled = torch.compile(function, backend="npu_iree", dynamic=is_dynamic, options=options)
    for argument in (x, x[1:]):
        assert_same(compiled(argument), function(argument))


def test_a_truth_is_one_among_complex_numbers() -> None:
    def chosen(z: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        parts = [z * mask, mask * 2j, torch.where(mask, mask, z), torch.cat([mask, z])]
        return [torch.view_as_real(part) for part in parts]

    for dtype in (torch.complex64, torch.complex128):
        z = torch.ones(3, dtype=dtype) * (2 - 3j)
        mask = torch.tensor([True, False, True])
        compiled = torch.compile(chosen, backend="npu_iree", options={"fallback": "error"})
        assert_same(compiled(z, mask), chosen(z, mask))


def test_the_gradient_of_a_circular_pad_of_unknown_sizes() -> None:
    """PyTorch reads the strides of what it pads into."""

    def pad(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (1, 2), mode="circular") * 2

    compiled = torch.compile(pad, backend="npu_iree", dynamic=True, options={"fallback": "error"})
    for shape in [(2, 3, 5), (4, 3, 7)]:
        x = torch.randn(shape, generator=GENERATOR, requires_grad=True)
        results = compiled(x), pad(x)
        assert_same(*results)
        assert_same(*(torch.autograd.grad(y.square().sum(), x) for y in results))


def test_the_gradient_of_what_is_written_by_steps() -> None:
    options = {"fallback": "error"}
    compiled = torch.compile(written_by_steps, backend="npu_iree", options=options)
    gradients = []
    for call in (compiled, written_by_steps):
        x = X.clone().requires_grad_()
        call(x).square().sum().backward()
        gradients.append(x.grad)
    assert_same(*gradients)


def test_a_view_may_give_numbers_for_what_is_a_symbol() -> None:
    def merged(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.transpose(1, 2).reshape(x.shape[0], x.shape[2], 32) @ weight
        return rows.view(x.shape[0], x.shape[2], 4, 8).transpose(1, 2)

    options = {"fallback": "error"}
    compiled = torch.compile(merged, backend="npu_iree", dynamic=True, options=options)
    weight = torch.randn(32, 32, generator=GENERATOR)
    for batch, tokens in [(2, 3), (5, 7)]:
        x = torch.randn(batch, 4, tokens, 8, generator=GENERATOR)
        assert_same(compiled(x, weight), merged(x, weight))


def test_rows_of_batches_are_one_program(cold_counts: Counter[str]) -> None:
    """Tokens that are kept, and where they are put back; no size is known."""

    def kept(x: torch.Tensor, tokens: torch.Tensor) -> Any:
        rows = tokens[..., None].expand(-1, -1, x.shape[2])
        taken = x.gather(1, rows) * 2
        back = torch.zeros_like(x).scatter_add(1, rows, taken)
        return taken, back, x.scatter_reduce(1, rows, taken, "amax")

    compiled = torch.compile(kept, backend="npu_iree", dynamic=True, options={"fallback": "error"})
    for batch, length, count, width in [(3, 7, 4, 5), (2, 9, 12, 3)]:
        x = torch.randn(batch, length, width, generator=GENERATOR)
        tokens = torch.randint(0, length, (batch, count), generator=GENERATOR)
        assert_same(compiled(x, tokens), kept(x, tokens))
    assert (cold_counts["compiles"], cold_counts["refused_flags"]) == (1, 0)
    with pytest.raises(IndexError, match="out of range in dimension 1"):
        compiled(x, tokens + 9)


def test_rows_of_known_sizes_are_put_where_they_go(cold_counts: Counter[str]) -> None:
    """By one index for all batches, or each by its own; no row goes to the last place."""

    def put(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
        of_all, of_each = index[0, :, None, None].expand_as(y), index.mT[..., None].expand_as(y)
        return [
            x.scatter_reduce(0, of_all, y, "amax", include_self=False),
            x.scatter_reduce(0, of_all, y, "mean"),
            x.scatter_reduce(0, of_each, y, "prod"),
            x.scatter_reduce(0, of_each, y, "mean", include_self=False),
            x.scatter(0, of_each[:6], 2.5),
        ]

    x, y = torch.randn(6, 3, 5, generator=GENERATOR), torch.randn(9, 3, 5, generator=GENERATOR)
    y[2, 1, 3] = torch.nan
    index = torch.randint(0, 5, (3, 9), generator=GENERATOR)
    compiled = torch.compile(put, backend="npu_iree", options={"fallback": "error"})
    assert_same(compiled(x, y, index), put(x, y, index))
    assert (cold_counts["compiles"], cold_counts["refused_flags"]) == (1, 0)


def test_rows_of_a_graphs_edges_are_one_program(cold_counts: Counter[str]) -> None:
    """One index for each row, repeated along it; how many edges there are is not known."""

    def passed_on(x: torch.Tensor, edges: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sources, targets = edges.unsqueeze(-1)
        sent = x.gather(0, sources.expand(-1, x.shape[1] - 1)) * weights
        taken = torch.ones_like(x[:, 1:]).scatter_add(0, targets.expand(-1, 5), sent)
        return taken + x.gather(1, edges[:1] % 5)[:, :1] + x[:, :5]

    compiled = torch.compile(passed_on, backend="npu_iree", options={"fallback": "error"})
    for count in (7, 4, 33):
        edges = torch.randint(0, 5, (2, count), generator=GENERATOR)
        weights = torch.rand(count, 1, generator=GENERATOR)
        torch._dynamo.maybe_mark_dynamic(edges, 1)
        torch._dynamo.maybe_mark_dynamic(weights, 0)
        assert_same(compiled(X, edges, weights), passed_on(X, edges, weights))
    assert (cold_counts["compiles"], cold_counts["refused_flags"]) == (1, 0)
    with pytest.raises(IndexError, match="out of range"):
        compiled(X, edges + 1, weights)

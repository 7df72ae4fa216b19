"""Triangular systems of few rows are solved on the device, as precisely as eager solves them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")

# upper, left, unitriangular
WAYS = ((False, True, False), (True, True, True), (False, False, True), (True, False, False))


def solve_all_ways(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    return [
        torch.linalg.solve_triangular(
            a, b if left else b.mT, upper=upper, left=left, unitriangular=unitriangular
        )
        for upper, left, unitriangular in WAYS
    ]


def solve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)


def system(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give two matrices, and three right sides for each."""
    torch.manual_seed(0)
    a = torch.randn(2, rows, rows) / rows**0.5 + 3 * torch.eye(rows)
    return a, torch.randn(3, 1, rows, 5)


@pytest.mark.slow
def test_all_ways_to_solve(counts: Counter[str]) -> None:
    a, b = system(20)
    found = torch.compile(solve_all_ways, backend="npu_iree")(a, b)
    for one, other in zip(found, solve_all_ways(a, b), strict=True):
        assert_same(one, other)
        assert one.stride() == other.stride()
    assert (counts["regions"], counts["host_ops"]) == (1, 0)


@pytest.mark.sweep
@pytest.mark.parametrize("weight", [0.5, 0.9, -0.3])
def test_what_the_powers_of_a_matrix_would_not_solve(weight: float) -> None:
    """Of 64 rows that are alike, the inverse is small, and a series for it is not."""
    a = torch.full((64, 64), weight).tril(-1) + torch.eye(64)
    b = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    found, exact = torch.compile(solve, backend="npu_iree")(a, b), solve(a.double(), b.double())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-6 * float(exact.abs().max()))


@pytest.mark.sweep
def test_gradients(counts: Counter[str]) -> None:
    a, b = (x.requires_grad_() for x in system(20))
    wanted = torch.autograd.grad(solve(a, b).square().sum(), (a, b))
    fast = torch.compile(solve, backend="npu_iree")
    found = torch.autograd.grad(fast(a, b).square().sum(), (a, b))
    assert_same(list(found), list(wanted))
    assert [g.stride() for g in found] == [g.stride() for g in wanted]
    assert counts["unsupported_ops"] == 0


@pytest.mark.sweep
def test_what_is_not_read_may_be_anything_and_what_is_lost_stays_behind() -> None:
    a, b = system(40)
    a = torch.where(torch.ones(40, 40).triu() > 0, torch.nan, a)  # the diagonal, too
    fast = torch.compile(solve, backend="npu_iree")
    assert_same(fast(a, b), solve(a, b))
    b[0, 0, 21, 2] = torch.nan
    assert_same(fast(a, b), solve(a, b))
    b[1, 0, 3, 1] = torch.inf
    a[1, 30, 7] = torch.nan
    assert torch.equal(fast(a, b).isfinite(), solve(a, b).isfinite())


@pytest.mark.sweep
def test_any_number_of_systems(counts: Counter[str]) -> None:
    fast = torch.compile(solve, backend="npu_iree")
    for count in (2, 5):
        a, b = torch.randn(count, 16, 16) / 4, torch.randn(count, 16, 7)
        assert_same(fast(a, b), solve(a, b))
    assert counts["host_ops"] == 0


def in_chunks_of_16(x: torch.Tensor) -> torch.Tensor:
    """Solve what the rows of a chunk say of each other, as linear attention does."""
    padded = F.pad(x, (0, 0, 0, -x.shape[2] % 16))
    chunks = padded.view(*x.shape[:2], -1, 16, x.shape[3])
    decay = chunks.sum(-1).cumsum(-1)
    return solve((decay.unsqueeze(-1) - decay.unsqueeze(-2)).tanh() / 16, chunks)


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [(7, 11, 16), (20, 33, 64)])  # one chunk, or several
def test_the_rows_of_a_chunk_are_known(rows: tuple[int, ...], cold_counts: Counter[str]) -> None:
    fast = torch.compile(in_chunks_of_16, backend="npu_iree")
    for count, size in enumerate(rows, start=2):
        x = torch.randn(count, 4, size, 8, generator=torch.Generator().manual_seed(size))
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 2)
        assert_same(fast(x), in_chunks_of_16(x))
    assert (cold_counts["compiles"], cold_counts["regions"], cold_counts["host_ops"]) == (1, 1, 0)


def test_many_rows_are_lapacks(counts: Counter[str]) -> None:
    a, b = system(200)
    assert_same(torch.compile(solve, backend="npu_iree")(a / 10, b), solve(a / 10, b))
    assert counts["host_ops"] == 1

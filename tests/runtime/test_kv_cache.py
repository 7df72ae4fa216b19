"""A static KV cache: eager's tokens, and the cache stays where it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_iree
from either import LOCAL_FIRST
from models.generation import LENGTH, PROMPT, TOKENS, generate, llama
from npu_iree.transfers import Ledger
from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture(params=LOCAL_FIRST)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


SHAPE = (1, 2, LENGTH, 16)  # of a layer's keys


@pytest.mark.slow
@pytest.mark.parametrize(
    "disabled",
    [
        pytest.param([], id="all"),
        pytest.param(["aten.sigmoid"], id="host op", marks=pytest.mark.sweep),
    ],
)
def test_static_cache_generation_gives_eagers_tokens(
    disabled: list[str], counts: Counter[str]
) -> None:
    model = llama()
    prompt = torch.tensor([PROMPT])
    expected = generate(model, prompt)
    model.forward = torch.compile(
        model.forward, backend="npu_iree", options={"disabled_ops": disabled}
    )
    ledger = Ledger()
    with npu_iree.record_transfers(ledger):
        assert torch.equal(generate(model, prompt), expected)
    assert expected.shape == (1, 7 + TOKENS)
    cache_bytes = 4 * torch.Size((1, 2, 7 + TOKENS - 1, 16)).numel()
    crossed = [t for t in ledger.transfers if t.nbytes == cache_bytes]
    back = [t for t in crossed if t.kind == "d2h"]
    assert len(back) == 2 * 2 * TOKENS, "keys and values of two layers"
    assert [t for t in crossed if t.mode == "staged"] == []
    assert counts["graphs"] <= 3, "prompt and step, and no more"


def step(cache: torch.Tensor, position: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(2, position, row)
    return (row @ cache.mT).softmax(-1) @ cache


def test_a_step_writes_into_the_cache_in_place(counts: Counter[str]) -> None:
    compiled = torch.compile(step, backend="npu_iree")
    ours, eagers = torch.zeros(SHAPE), torch.zeros(SHAPE)
    address, alias = ours.data_ptr(), ours[:, 1]
    for i in range(6):
        position, row = torch.tensor([i * 3]), torch.randn(1, 2, 1, 16)
        version = ours._version
        with torch.no_grad(), npu_iree.copy_budget(h2d=0, d2h=0):
            assert_same(compiled(ours, position, row), step(eagers, position, row))
        assert_same(ours, eagers)
        assert ours._version == version + 1
    assert ours.data_ptr() == address
    assert_same(alias, eagers[:, 1])
    assert counts["graphs"] == 1


def test_a_step_copies_no_cache_inside_of_the_region(dump: Path) -> None:
    with torch.no_grad():
        torch.compile(step, backend="npu_iree")(
            torch.zeros(SHAPE), torch.tensor([1]), torch.randn(1, 2, 1, 16)
        )
    (flow,) = dump.rglob("*.flow.mlir")
    main = flow.read_text().partition("util.func public @main(")[2]
    assert "flow.tensor.clone" not in main
    whole = "tensor<1x2x48x16xf32>"
    copies = [line for line in main.splitlines() if "slow_memcpy" in line and whole in line]
    assert copies == []


def other_reader(cache: torch.Tensor, position: torch.Tensor, row: torch.Tensor) -> Any:
    before = torch.median(cache)  # the host reads the old value
    cache.index_copy_(2, position, row)
    return before, cache.sum()


def both_values(cache: torch.Tensor, position: torch.Tensor, row: torch.Tensor) -> Any:
    before = cache.clone()
    cache.index_copy_(2, position, row)
    return before, cache.clone(), cache[0], cache


def through_views(cache: torch.Tensor, position: torch.Tensor, row: torch.Tensor) -> Any:
    cache[:, 0].index_copy_(1, position, row[:, 0])
    cache.mul_(0.5)
    return cache.mT @ cache, row * 2


def swapped(cache: torch.Tensor, position: torch.Tensor, row: torch.Tensor) -> Any:
    old = cache[:, :, :1].clone()
    cache[:, :, :1].copy_(row)
    row.copy_(old)
    return old + 1


HAZARDS: list[Callable[..., Any]] = [other_reader, both_values, through_views, swapped]


@pytest.mark.parametrize("function", HAZARDS)
def test_what_else_reads_a_cache_sees_what_eager_sees(
    function: Callable[..., Any], target: str
) -> None:
    compiled = torch.compile(function, backend="npu_iree", options={"target": target})
    ours, eagers = torch.randn(SHAPE), torch.empty(SHAPE)
    eagers.copy_(ours)
    kept = []
    for i in range(3):
        rows = [torch.full((1, 2, 1, 16), float(i)) for _ in range(2)]
        with torch.no_grad():
            actual = compiled(ours, torch.tensor([i]), rows[0])
            expected = function(eagers, torch.tensor([i]), rows[1])
        assert_same(actual, expected)
        assert_same([ours, rows[0]], [eagers, rows[1]])
        kept.append((actual, expected))
    for (
        actual,
        expected,
    ) in kept:  # results are not overwritten by later calls, but where eager's are
        assert_same(actual, expected)


def test_a_lazy_copy_of_a_cache_is_not_written_to() -> None:
    compiled = torch.compile(step, backend="npu_iree")
    cache = torch.zeros(SHAPE)
    copy = torch._lazy_clone(cache)
    with torch.no_grad():
        compiled(cache, torch.tensor([1]), torch.ones(1, 2, 1, 16))
    assert float(copy.sum()) == 0
    assert float(cache.sum()) == 32

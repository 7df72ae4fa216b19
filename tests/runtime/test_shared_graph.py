"""Modules of one class share a compiled graph, and each keeps its weights on the device."""

from __future__ import annotations

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import npu_iree
from npu_iree import runner, shared_graph
from npu_iree.shared_graph import SharedGraph
from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")


class Block(nn.Module):
    """What a network has several of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + torch.relu(self.linear(self.norm(x)))
        return found


def compiled_blocks(count: int) -> nn.Sequential:
    blocks = nn.Sequential(*(Block() for _ in range(count))).requires_grad_(False)
    for block in blocks:
        block.compile(backend="npu_iree")
    return blocks


def eager(blocks: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return nn.Sequential(*(copy.deepcopy(block) for block in blocks))(x)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note each time that a graph is loaded once more."""
    found: list[Any] = []
    again = runner.Runner.again
    monkeypatch.setattr(runner.Runner, "again", lambda self: found.append(self.plan) or again(self))
    return found


def test_blocks_that_are_compiled_one_by_one_bind_their_weights_once(loads: list[Any]) -> None:
    blocks, x = compiled_blocks(4), torch.randn(3, 8)
    expected = eager(blocks, x)
    assert_same(blocks(x), expected)
    assert len(loads) == 3
    with npu_iree.record_transfers() as transfers:
        assert_same(blocks(x), expected)
    puts = [t for t in transfers.entries if t.kind == "h2d"]
    assert [t.nbytes for t in puts] == [x.nbytes] * 4, "and no weights"
    assert len(loads) == 3


def test_a_change_of_one_blocks_weights_is_its_own() -> None:
    blocks, x = compiled_blocks(3), torch.randn(3, 8)
    blocks(x)
    blocks[1].linear.weight.mul_(2)
    blocks[2].load_state_dict(Block().state_dict(), assign=True)
    assert_same(blocks(x), eager(blocks, x))
    torch.utils.swap_tensors(blocks[0].linear.weight, blocks[2].linear.weight)
    assert_same(blocks(x), eager(blocks, x))
    blocks[0].norm.weight = nn.Parameter(torch.rand(8), requires_grad=False)
    for _ in range(2):
        assert_same(blocks(x), eager(blocks, x))


def test_what_a_model_had_is_the_next_ones_when_it_is_gone(loads: list[Any]) -> None:
    x = torch.randn(3, 8)
    kept = compiled_blocks(1)
    kept(x)
    for _ in range(4):
        blocks = compiled_blocks(2)
        assert_same(blocks(x), eager(blocks, x))
        del blocks
        gc.collect()
    assert len(loads) <= 1 + 4, "two for the first, and one for each later pair"
    assert_same(kept(x), eager(kept, x))


def test_what_was_bound_goes_with_its_model() -> None:
    """And the next model of the graph binds its own."""
    shared: list[SharedGraph] = []
    for _ in range(2):
        blocks, x = compiled_blocks(1), torch.randn(3, 8)
        assert_same(blocks(x), eager(blocks, x))
        shared = [found for found in gc.get_objects() if type(found) is SharedGraph]
        assert any(bound_by(graph) for graph in shared)
        del blocks
        gc.collect()
        assert not any(bound_by(graph) for graph in shared)


def bound_by(graph: SharedGraph) -> list[Any]:
    """What the runner of the model that ran last holds of it, on the host and on the device."""
    runner = graph._last[2]
    stored = [use.stored for use in runner._weights._every if use.stored.numel()]
    return [*stored, *(e._queue.context for e in runner.executables.values() if e._queue.context)]


def test_a_graph_that_nobody_holds_is_gone_at_once() -> None:
    runner: Any = SimpleNamespace(plan=None, run=list)
    graph, weight = SharedGraph(runner, 0), torch.ones(1)
    graph(weight)
    gone = weakref.ref(graph)
    del graph
    assert gone() is None


def test_more_models_than_are_kept_are_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_graph, "_MOST_MODELS", 2)
    blocks, x = compiled_blocks(4), torch.randn(3, 8)
    for _ in range(2):
        assert_same(blocks(x), eager(blocks, x))

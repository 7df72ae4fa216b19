"""Random numbers: reproduced by a seed, of the right statistics, and eager's own if asked for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import npu_iree
from either import LOCAL_FIRST
from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture(params=LOCAL_FIRST)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


N = 64  # of the square tensors whose statistics are looked at

Draw = Callable[[torch.Tensor], torch.Tensor]
# name -> what draws from ones, and the mean, standard deviation and range of what it draws
DRAWS: dict[str, tuple[Draw, float, float, tuple[float, float]]] = {
    "rand": (lambda x: torch.rand(x.shape), 0.5, math.sqrt(1 / 12), (0, 1)),
    "rand_like": (torch.rand_like, 0.5, math.sqrt(1 / 12), (0, 1)),
    "randn": (lambda x: torch.randn(x.shape), 0, 1, (-9, 9)),
    "randn_like": (torch.randn_like, 0, 1, (-9, 9)),
    "randint": (lambda x: torch.randint(3, 9, x.shape).float(), 5.5, math.sqrt(35 / 12), (3, 8)),
    "randint_like": (lambda x: torch.randint_like(x, 6), 2.5, math.sqrt(35 / 12), (0, 5)),
    "normal": (lambda x: torch.normal(x * 2, x * 3), 2, 3, (-30, 30)),
    "normal_": (lambda x: x.clone().normal_(1, 2), 1, 2, (-20, 20)),
    "uniform_": (lambda x: x.clone().uniform_(-1, 3), 1, math.sqrt(16 / 12), (-1, 3)),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.3), 0.3, math.sqrt(0.21), (0, 1)),
    "bernoulli_": (lambda x: x.clone().bernoulli_(0.3), 0.3, math.sqrt(0.21), (0, 1)),
    "exponential_": (lambda x: x.clone().exponential_(2), 0.5, 0.5, (0, 20)),
    "geometric_": (lambda x: x.clone().geometric_(0.5), 2, math.sqrt(2), (1, 60)),
    "log_normal_": (lambda x: x.clone().log_normal_(0, 0.5).log(), 0, 0.5, (-5, 5)),
    "poisson": (lambda x: torch.poisson(x * 4), 4, 2, (0, 30)),
    "multinomial": (lambda x: torch.multinomial(x, N, True).float(), 31.5, 18.47, (0, 63)),
    "randperm": (lambda x: torch.randperm(N * N).float() / N**2, 0.5, math.sqrt(1 / 12), (0, 1)),
    "dropout": (lambda x: F.dropout(x, 0.2), 1, 0.5, (0, 1.25)),
    "alpha_dropout": (lambda x: F.alpha_dropout(torch.randn_like(x), 0.2), 0, 1, (-9, 9)),
    "feature_dropout": (lambda x: torch.feature_dropout(x, 0.2, True), 1, 0.5, (0, 1.25)),
    "rrelu": (lambda x: -F.rrelu(-x, 0, 1, True), 0.5, math.sqrt(1 / 12), (0, 1)),
}

_ROUNDED = ("dropout", "alpha_dropout", "rrelu", "normal", "log_normal_", "feature_dropout")
_ORDERS = {4: torch.channels_last}  # by the number of dimensions


def test_statistics_are_right_and_a_seed_reproduces() -> None:
    def every(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: draw(x * 1.0) for name, (draw, *_) in DRAWS.items()}

    compiled = torch.compile(every, backend="npu_iree")

    def seeded(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return compiled(torch.ones(N, N))

    first, again, other = seeded(1), seeded(1), seeded(2)
    for name, (_, mean, deviation, (low, high)) in DRAWS.items():
        values = first[name]
        samples = N if name == "feature_dropout" else N * N
        error = 5 * deviation / math.sqrt(samples)
        assert abs(float(values.mean()) - mean) < error, name
        assert abs(float(values.std()) - deviation) < 0.35 * deviation, name
        assert low <= float(values.min()), name
        assert float(values.max()) <= high, name
        assert torch.equal(values, again[name]), name
        assert not torch.equal(values, other[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(N, N), (3, 5), (2, 4, 3, 3)], ids=str)
def test_rng_host_draws_what_eager_draws(shape: tuple[int, ...]) -> None:
    draws = {name: draw for name, (draw, *_) in DRAWS.items()}
    if shape != (N, N):
        del draws["multinomial"]  # it draws from the columns of a square

    def every(x: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
        found = {}
        for name, draw in draws.items():
            y = draw(x * 1.0)
            found[name] = y, draw(torch.relu(x)) * 2 + y, torch.rand(3)
        return found

    compiled = torch.compile(every, backend="npu_iree", options={"rng": "host"})
    for memory_format in {
        torch.contiguous_format,
        _ORDERS.get(len(shape), torch.contiguous_format),
    }:
        x, outcomes = torch.ones(shape).to(memory_format=memory_format), []
        for call in (compiled, every):
            torch.manual_seed(3)
            outcomes.append((call(x), torch.get_rng_state()))
        (ours, state), (eagers, expected) = outcomes
        assert torch.equal(state, expected)
        assert_same(ours, eagers)
        for name in draws:
            # products may round in another way, what was drawn may not
            is_exact = all(map(torch.equal, ours[name], eagers[name]))
            assert is_exact or name in _ROUNDED, name


class Noisy(nn.Module):
    """Dropouts, noise and sampling in an order that matters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
        self.attention = nn.MultiheadAttention(32, 4, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.first(x), 0.3) + torch.randn(32) * 0.1
        y = self.attention(y, y, y, need_weights=False)[0]
        z = y * torch.bernoulli(torch.sigmoid(y.detach()))
        return self.second(F.dropout(F.relu(z), 0.5, self.training))


@pytest.mark.slow
def test_rng_host_trains_with_eagers_numbers(target: str) -> None:
    """The masks of the backward pass are those of the forward pass, and those of eager."""
    torch.manual_seed(0)
    model = Noisy()
    compiled = torch.compile(model, backend="npu_iree", options={"target": target, "rng": "host"})
    outcomes = []
    for call in (compiled, model):
        torch.manual_seed(5)
        steps = []
        for seed in range(3):
            x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(seed))
            model.zero_grad()
            call(x).pow(2).sum().backward()
            steps.append([p.grad for p in model.parameters()])
        outcomes.append([*steps, torch.get_rng_state()])
    assert_same(*outcomes)


@pytest.mark.parametrize("rng", ["default", "host"])
@pytest.mark.parametrize("p", [0.25, 0.0, 1.0])
def test_the_gradient_of_dropout_is_its_mask(rng: str, p: float, target: str) -> None:
    options = {"target": target, "rng": rng}
    x = torch.ones(64, 64, requires_grad=True)
    result = torch.compile(lambda x: F.dropout(x, p), backend="npu_iree", options=options)(x)
    result.sum().backward()
    assert x.grad is not None
    assert torch.equal(result.detach(), x.grad)
    assert abs(float((result > 0).float().mean()) - (1 - p)) < 0.03


@pytest.mark.parametrize("rng", ["default", "host"])
def test_a_generator_of_ones_own_is_honoured(rng: str) -> None:
    def function(x: torch.Tensor, generator: torch.Generator) -> Any:
        noise = torch.rand(4, generator=generator)
        mask = torch.empty(4).bernoulli_(0.5, generator=generator)
        return x * noise + 1, torch.randn(4, generator=generator) + torch.randn(4), mask * 2

    compiled = torch.compile(function, backend="npu_iree", options={"rng": rng})
    outcomes = []
    for call in (compiled, function):
        torch.manual_seed(9)
        generator = torch.Generator().manual_seed(4)
        outcomes.append([*call(torch.ones(4), generator), *call(torch.ones(4), generator)])
        outcomes[-1].append(generator.get_state())
    assert_same(*outcomes)


def test_a_mask_does_not_wait_for_the_device(counts: Counter[str]) -> None:
    """The host draws from sizes alone, so nothing is fetched before the result."""
    compiled = torch.compile(lambda x: F.dropout(x @ x, 0.5) @ x, backend="npu_iree")
    x = torch.randn(16, 16)
    compiled(x)
    with npu_iree.copy_budget(waits=1), npu_iree.record_transfers() as ledger:
        compiled(x)
    assert [entry.owner for entry in ledger.waits] == ["the caller"]


def test_what_is_drawn_in_another_order_is_no_op_that_the_target_lacks(
    counts: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    compiled = torch.compile(lambda x: torch.randn_like((x * 2).t()), backend="npu_iree")
    assert compiled(torch.ones(4, 9)).stride() == (1, 9)
    assert counts["unsupported_ops"] == 1, "the draw itself"
    assert "empty" not in caplog.text

"""What compilers get wrong by tradition; each case is named after its tradition."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from npu_iree import NpuIreeError
from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compiled(function: Callable[..., Any], target: str, **how: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="npu_iree", options={"target": target}, **how)


def both(function: Callable[..., Any], target: str) -> tuple[Callable[..., Any], ...]:
    """Give what is compiled for a target, and eager."""
    return compiled(function, target), function


def state(model: nn.Module) -> list[Any]:
    """Give everything that training may have changed: parameters, gradients and buffers."""
    parameters = [(p.detach(), p.grad) for p in model.parameters()]
    return [parameters, list(model.buffers())]


class Both:
    """A model twice, one of them compiled; what is done to it is done to both, and compared."""

    def __init__(self, model: nn.Module, target: str) -> None:
        self.models = (copy.deepcopy(model), copy.deepcopy(model))
        self.calls = (compiled(self.models[0], target), self.models[1])

    def do(self, step: Callable[[nn.Module, Callable[..., Any]], Any]) -> None:
        results = []
        for model, call in zip(self.models, self.calls, strict=True):
            torch.manual_seed(7)
            results.append(step(model, call))
        assert_same(*results)
        assert_same(*map(state, self.models))


def test_a_view_that_is_mutated_after_capture(target: str, counts: Counter[str]) -> None:
    """A view of an argument is changed by the caller between calls, and inside the next one."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        row = x[1]
        y = x * 2
        row.add_(y[0])
        x.view(-1)[::3].mul_(-1)
        return y + row, row, x.t()

    outcomes = []
    for call in both(function, target):
        base = data(6, 4)
        x = base[1:5]
        results = []
        for _ in range(3):
            results.append([t.clone() for t in call(x)])
            base[2].mul_(3)
            x.t()[0].fill_(0.5)
        outcomes.append([results, base])
    assert_same(*outcomes)
    assert counts["graphs"] == 1


def test_a_view_that_the_call_returns_is_mutated_afterwards(target: str) -> None:
    outcomes = []
    for call in both(lambda x: (x[1:].t(), x.view(-1), x + 1), target):
        x = data(3, 4)
        part, flat, fresh = call(x)
        part.mul_(2)
        flat[0] = 9
        fresh.fill_(5)
        outcomes.append([x, part, flat, call(x)])
    assert_same(*outcomes)


def test_an_expanded_input_that_is_written_to(target: str) -> None:
    """Eager refuses to write to memory that is several elements at once; so do we."""

    def whole(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1) * 2

    for call in both(whole, target):
        with pytest.raises(RuntimeError, match="single memory location"):
            call(data(3, 1).expand(3, 4))

    def element(x: torch.Tensor) -> torch.Tensor:
        x[:, 0].add_(1)
        return x * 2

    outcomes = []
    for call in both(element, target):
        x = data(3, 1)
        outcomes.append([call(x.expand(3, 4)), x])
    assert_same(*outcomes)


def test_an_input_that_overlaps_itself_and_is_written_to(
    any_target: str, caplog: pytest.LogCaptureFixture
) -> None:
    def column(x: torch.Tensor) -> torch.Tensor:
        x[:, :1].mul_(3)
        return x.sum()

    outcomes = []
    for call in both(column, any_target):
        rows = data(9)
        outcomes.append([call(rows.as_strided((4, 6), (1, 1))), rows])
    assert_same(*outcomes)
    assert "several elements in the same place" in caplog.text
    caplog.clear()
    apart = []
    for call in both(column, any_target):
        every = data(4, 12)
        apart.append([call(every[:, ::2]), every])
    assert_same(*apart)
    assert "eager" not in caplog.text


def part(base: torch.Tensor, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Give two tensors of 16 elements that share memory in some way."""
    if how == "not":
        return base[:16].clone(), base[16:32].clone()
    if how == "with NumPy":
        return base[:16], torch.from_numpy(base.numpy())[:16]
    first, second = {"apart": (0, 16), "in part": (0, 8), "further on": (16, 24), "all": (0, 0)}[
        how
    ]
    return base[first : first + 16], base[second : second + 16]


WAYS = ["not", "apart", "in part", "further on", "all", "with NumPy"]


@pytest.mark.parametrize("first", WAYS)
def test_arguments_that_overlap_in_another_way_than_at_first(first: str) -> None:
    """One of them is written to; neither Dynamo's guards nor AOTAutograd's look again."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        x.mul_(y + 2)
        return y + x.sum()

    outcomes = []
    for call in both(function, "npu-local"):
        outcome = []
        for how in (first, *WAYS):
            base = data(64)
            x, y = part(base, how)
            outcome.append([call(x, y).clone(), x, y, base])
        outcomes.append(outcome)
    assert_same(*outcomes)


def test_an_unknown_overlap_is_an_error_where_nothing_may_run_in_eager() -> None:
    options = {"fallback": "error"}
    call = torch.compile(lambda x, y: x.add_(y), backend="npu_iree", options=options)
    base = data(8)
    call(base[:4], base[4:])
    before = base.clone()
    with pytest.raises(NpuIreeError, match="overlap in another way"):
        call(base[:4], base[2:6])
    assert_same(base, before)


@torch.library.custom_op("tradition_tests::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    if not bool((x > 0).all()):
        raise ValueError("not positive")
    return x.clone()


@positive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_what_fails_before_a_write_leaves_the_argument_as_it_was(any_target: str) -> None:
    def function(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = positive(x)
        state.index_copy_(0, torch.tensor([1]), state[:1] + 1)
        state[0] = state.sum()
        return y.sqrt()

    for call in both(function, any_target):
        state = data(64, 64)
        call(state, torch.ones(4))
        before = state.clone()
        with pytest.raises(ValueError, match="not positive"):
            call(state, torch.zeros(4))
        assert_same(state, before)


class Drifting(nn.Module):
    """What it computes from its state is cheap, so that the backward pass may compute it again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(data(4, 4))
        self.register_buffer("state", data(3, 4, seed=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cos(x @ self.weight) * torch.sin(self.state * 2)
        self.state.add_(1)
        return y * torch.sin(self.state)


def test_a_state_that_the_backward_pass_needs_as_it_was(any_target: str) -> None:
    pair = Both(Drifting(), any_target)
    for _ in range(2):
        pair.do(lambda model, call: call(data(3, 4, seed=2)).sum().backward())
    assert_same(pair.models[0].state, data(3, 4, seed=1) + 1 + 1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.norm(self.embed(tokens))), tokens.roll(1))


@pytest.mark.parametrize(
    "optimizer", [pytest.param(torch.optim.SGD, marks=pytest.mark.sweep), torch.optim.AdamW]
)
def test_tied_embeddings_that_are_trained(optimizer: Any, any_target: str) -> None:
    torch.manual_seed(0)
    pair = Both(Tied(), any_target)
    steps = {id(m): optimizer(m.parameters(), lr=0.05) for m in pair.models}

    def step(model: nn.Module, call: Callable[..., Any]) -> torch.Tensor:
        steps[id(model)].zero_grad()
        loss: torch.Tensor = call(torch.tensor([1, 5, 5, 11, 0]))
        loss.backward()
        steps[id(model)].step()
        return loss

    for _ in range(3):
        pair.do(step)
    assert pair.models[0].head.weight is pair.models[0].embed.weight


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("grad", [False, True])
def test_batch_norms_running_statistics(
    grad: bool, momentum: float | None, any_target: str, counts: Counter[str]
) -> None:
    """They change in training, are read in evaluation, and do so after each other."""
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False),  # the gradient of a bias is zero there, but for rounding
        nn.BatchNorm2d(3, momentum=momentum),
        nn.ReLU(),
    )
    pair = Both(model, any_target)
    batches = [(True, data(4, 2, 6, 6, seed=i) + i) for i in range(3)]
    batches[2:2] = [(False, batches[0][1])]
    for train, x in (*batches, (False, batches[1][1])):

        def step(
            model: nn.Module, call: Callable[..., Any], train: bool = train, x: Any = x
        ) -> torch.Tensor:
            model.train(train)
            with torch.set_grad_enabled(grad):
                result: torch.Tensor = call(x)
            if grad:
                result.sum().backward()
            return result.detach()

        pair.do(step)
    assert int(pair.models[0][1].num_batches_tracked) == 3


def test_an_output_that_is_an_input(target: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, x + y, y, x.add_(1)

    outcomes = []
    for call in both(function, target):
        x, y = data(4), data(4, seed=1)
        a, fresh, b, c = call(x, y)
        assert a is x
        assert b is y
        assert c is x
        a.mul_(2)
        outcomes.append([a, fresh, b, c, x, y])
    assert_same(*outcomes)


def test_an_output_that_is_an_input_and_wants_a_gradient(any_target: str) -> None:
    outcomes = []
    for call in both(lambda x, w: (x, x * w, w.view(-1)), any_target):
        x, w = data(2, 3).requires_grad_(), data(2, 3, seed=1).requires_grad_()
        same, product, view = call(x, w)
        (same.sum() + (product * product).sum() + view[1]).backward()
        outcomes.append([x.grad, w.grad, same.detach(), view.detach()])
    assert_same(*outcomes)


def test_outputs_that_alias_one_another(target: str) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp()
        return y, y.t(), y[0], y.detach(), y, y.clone()

    outcomes = []
    for call in both(function, target):
        results = call(data(3, 4))
        results[1][2, 1] = 7
        results[3].mul_(2)
        outcomes.append(results)
    assert_same(*outcomes)
    assert outcomes[0][0] is outcomes[0][4]


def test_outputs_that_alias_one_another_and_want_gradients(any_target: str) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp()
        return y, y.t(), y[0] * 2

    outcomes = []
    for call in both(function, any_target):
        x = data(3, 4).requires_grad_()
        y, turned, row = call(x)
        (y.sum() + (turned**2).sum() + row.sum()).backward()
        outcomes.append([x.grad, y.detach(), turned.detach(), row.detach()])
    assert_same(*outcomes)


@pytest.mark.parametrize("how", ["step", "data", "argument"])
def test_a_parameter_that_is_updated_between_forward_and_backward(how: str, target: str) -> None:
    """Eager refuses where it would need the old value, and takes the new one from `.data`."""
    outcomes = []
    for make in (lambda f: compiled(f, target), lambda f: f):
        weight, x = data(4, 4).requires_grad_(), data(2, 4, seed=1).requires_grad_()
        result = make(lambda x, w: torch.tanh(x @ w) @ w)(x, weight)
        with torch.no_grad():
            if how == "data":
                weight.data.mul_(2)
            else:
                (weight if how == "step" else x).add_(1)
        if how == "data":
            result.sum().backward()
            outcomes.append([x.grad, weight.grad])
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()
    if outcomes:
        assert_same(*outcomes)


def test_a_second_backward(any_target: str) -> None:
    outcomes = []
    for call in both(lambda x: torch.sin(x) * x, any_target):
        x = data(5).requires_grad_()
        loss = call(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        outcomes.append(x.grad)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_same(*outcomes)


def test_none_gradients(any_target: str) -> None:
    """Of what the result does not depend on, of integers, and of what nobody asks for."""

    def function(x: Any, unused: Any, index: Any, other: Any, plain: Any) -> Any:
        return x[index] * plain, other.detach() * 2

    outcomes = []
    for call in both(function, any_target):
        x, unused, other = (data(4, 3, seed=i).requires_grad_() for i in range(3))
        first, second = call(x, unused, torch.tensor([0, 2]), other, data(3))
        assert not second.requires_grad
        first.sum().backward()
        outcomes.append(x.grad)
        assert unused.grad is None
        assert other.grad is None
    assert_same(*outcomes)


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def test_frozen_parameters(any_target: str) -> None:
    """Frozen from the start, and thawed and frozen while the model is trained."""
    pair = Both(TwoBranches(), any_target)

    def step(model: Any, call: Callable[..., Any]) -> torch.Tensor:
        loss = call(data(3, 4)).pow(2).sum()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        return loss.detach()

    for frozen in (("first",), (), ("first",)):
        for model in pair.models:
            for name in ("first", "second", "unused"):
                getattr(model, name).requires_grad_(name not in frozen)
        pair.do(step)
    assert pair.models[0].unused.weight.grad is None


def test_everything_frozen_but_the_input(any_target: str) -> None:
    pair = Both(TwoBranches().requires_grad_(False), any_target)

    def step(model: nn.Module, call: Callable[..., Any]) -> torch.Tensor | None:
        x = data(3, 4).requires_grad_()
        call(x).sum().backward()
        return x.grad

    pair.do(step)
    assert all(parameter.grad is None for parameter in pair.models[0].parameters())


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.relu(self.layer(x))) @ self.layer.weight


def test_double_use_of_a_parameter(any_target: str) -> None:
    pair = Both(UsedTwice(), any_target)

    def step(model: nn.Module, call: Callable[..., Any]) -> torch.Tensor:
        loss = call(data(3, 4)).pow(2).mean() + call(data(3, 4, seed=1)).mean()
        loss.backward()
        return loss.detach()

    pair.do(step)
    assert all(parameter.grad is not None for parameter in pair.models[0].parameters())


def test_gradient_accumulation(any_target: str, counts: Counter[str]) -> None:
    pair = Both(TwoBranches(), any_target)
    steps = {id(m): torch.optim.SGD(m.parameters(), lr=0.1) for m in pair.models}

    def step(model: nn.Module, call: Callable[..., Any]) -> list[torch.Tensor]:
        losses = []
        for i in range(4):
            loss = call(data(3, 4, seed=i)).pow(2).mean() / 2
            loss.backward()
            losses.append(loss.detach())
            if i % 2:
                steps[id(model)].step()
                steps[id(model)].zero_grad(set_to_none=False)
        return losses

    pair.do(step)
    assert counts["graphs"] == 2, "one forward, one backward"


class Checkpointed(nn.Module):
    def __init__(self, dropout: float, reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Linear(4, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4)
        )
        self.head = nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(checkpoint(self.block, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool, any_target: str) -> None:
    pair = Both(Checkpointed(0.0, reentrant), any_target)

    def step(model: nn.Module, call: Callable[..., Any]) -> torch.Tensor:
        # without a gradient of its input, eager's reentrant kind has none at all
        loss = call(data(3, 4).requires_grad_()).pow(2).mean()
        loss.backward()
        return loss.detach()

    for _ in range(2):
        pair.do(step)


def test_activation_checkpointing_draws_the_same_dropout_again(any_target: str) -> None:
    """What is computed again for the backward pass must use the masks of the forward one."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: F.dropout(x * 1.0, 0.5), x, use_reentrant=False)

    x = torch.ones(32, 32, requires_grad=True)
    result = compiled(function, any_target)(x)
    result.sum().backward()
    assert x.grad is not None
    assert torch.equal(result.detach(), x.grad)
    assert 0.3 < float((result == 0).float().mean()) < 0.7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_autocast(where: str, dtype: torch.dtype, any_target: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=dtype):
                y = self.model(x)
            return y

    models = [copy.deepcopy(Inside() if where == "inside" else model) for _ in range(2)]
    outcomes = []
    for model_, call in zip(models, (compiled(models[0], any_target), models[1]), strict=True):
        with torch.autocast("cpu", dtype=dtype, enabled=where == "outside"):
            result = call(data(3, 8))
        loss = result.float().pow(2).mean()
        loss.backward()
        assert result.dtype is dtype
        gradients = [p.grad for p in model_.parameters()]
        assert all(g is not None and g.dtype is torch.float32 for g in gradients)
        # sums of products in the low dtype round at other places
        outcomes.append([result.detach(), *(g.to(dtype) for g in gradients if g is not None)])
    assert_same(*outcomes)

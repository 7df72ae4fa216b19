"""Training on "npu": eager-CPU's losses, and nothing comes back before the loss is read."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import npu_iree
from npu_iree import torch_device

NPU = "npu"
Batch = tuple[torch.Tensor, torch.Tensor]


def test_on_memory_of_its_own_nothing_crosses_but_what_is_read(
    told_of_npu_virtual: dict[str, Any],
) -> None:
    told = told_of_npu_virtual["training"]
    expected, *found = (torch.tensor(losses) for losses in told["losses"].values())
    for losses in found:
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert told["crossed"] == {"npu False": [3, 3], "npu True": [3, 3]}  # the losses, by item()


class Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)])
        is_same = stride == 1 and inner == outer
        self.short: nn.Module = nn.Identity()
        if not is_same:
            conv = nn.Conv2d(inner, outer, 1, stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.short(x))


class ResNet18(nn.Module):
    """The network of that name, an eighth as wide, with a graph break in its middle."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        sizes = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width]
        blocks = [
            Block(inner, outer, 1 if inner == outer else 2)
            for inner, outer in zip(sizes, [*sizes[1:], 8 * width], strict=True)
        ]
        self.first, self.rest = nn.Sequential(*blocks[:4]), nn.Sequential(*blocks[4:])
        self.head = nn.Linear(8 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.stem(x))
        torch._dynamo.graph_break()
        return self.head(self.rest(x).mean((2, 3)))


class Gpt2(nn.Module):
    """GPT-2, two layers of it, with a graph break before its head."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 64}
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(**sizes, **tokens)  # type: ignore[arg-type]
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.model.transformer(x).last_hidden_state
        torch._dynamo.graph_break()
        return self.model.lm_head(hidden).flatten(0, 1)


class Mlp(nn.Module):
    """Two layers with a dropout and a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(F.gelu(self.first(x)))
        torch._dynamo.graph_break()
        return self.second(x)


def images() -> Iterator[Batch]:
    for _ in range(3):
        yield torch.randn(4, 3, 64, 64), torch.randint(0, 10, (4,))


def rows() -> Iterator[Batch]:
    for _ in range(3):
        yield torch.randn(16, 32), torch.randint(0, 10, (16,))


def tokens() -> Iterator[Batch]:
    for _ in range(3):
        text = torch.randint(0, 256, (2, 17))
        yield text[:, :-1].contiguous(), text[:, 1:].reshape(-1)


def losses(
    build: Callable[[], nn.Module],
    batches: list[Batch],
    where: str,
    optimizer: type[torch.optim.Optimizer],
    compiled: bool,
) -> torch.Tensor:
    torch.manual_seed(0)
    model = build().train().to(where)
    call = torch.compile(model, backend="npu_iree") if compiled else model
    steps = optimizer(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    found = []
    for x, y in batches:
        with npu_iree.copy_budget(d2h=0):
            loss = F.cross_entropy(call(x.to(where)), y.to(where))
            steps.zero_grad()
            loss.backward()
            steps.step()
        found.append(loss)
    return torch.tensor([loss.item() for loss in found])


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("build", "batches", "optimizer"),
    [
        (Mlp, rows, torch.optim.AdamW),
        (ResNet18, images, torch.optim.SGD),
        (Gpt2, tokens, torch.optim.SGD),
    ],
)
def test_losses_are_those_of_the_cpu(
    build: Callable[[], nn.Module],
    batches: Callable[[], Iterator[Batch]],
    optimizer: type[torch.optim.Optimizer],
) -> None:
    given = list(batches())
    expected = losses(build, given, "cpu", optimizer, compiled=False)
    for compiled in (False, True):
        found = losses(build, given, NPU, optimizer, compiled)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert expected.unique().numel() == len(given)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(kind: Callable[..., nn.Module], bias: bool) -> None:
    def run(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        result, _ = layer(x)
        gradients = torch.autograd.grad(result.square().sum(), [x, *layer.parameters()])
        return [result.detach().cpu(), *(g.cpu() for g in gradients)]

    layer = kind(4, 8, bias=bias)
    x = torch.randn(3, 2, 4)
    expected = run(layer, x.clone().requires_grad_())
    npu_iree.register_device()
    found = run(layer.to(NPU), x.to(NPU).requires_grad_())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_a_compiled_call_saves_of_its_inputs_is_counted_once() -> None:
    npu_iree.register_device()
    x = torch.randn(64, 64).to(NPU).requires_grad_()
    sine = torch.compile(lambda x: x.sin(), backend="npu_iree")
    held = []
    for _ in range(3):
        sine(x)
        torch.npu.synchronize()
        held.append(torch.npu.memory_allocated())
    assert held[0] == held[1] == held[2]


@pytest.mark.parametrize("with_loss", [False, True])
def test_what_a_step_leaves_keeps_no_activations(with_loss: bool) -> None:
    npu_iree.register_device()
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Flatten()).to(NPU)
    x, kept = torch.randn(16, 3, 64, 64).to(NPU), []

    def loss(x: torch.Tensor) -> torch.Tensor:
        return net(x).square().mean()

    compiled = torch.compile(loss if with_loss else net, backend="npu_iree")
    target = torch_device.current.device()
    for _ in range(3):
        result = compiled(x)
        result = result if with_loss else result.square().mean()
        result.backward()
        kept.append(result.detach())
        del result
        torch.npu.synchronize()
        gc.collect()
        assert target.blocks.lent_bytes == 0
    assert int(net[1].num_batches_tracked) == 3
    assert kept[0].item() == kept[2].item()


def test_dropout_is_drawn_again_where_activations_are_checkpointed() -> None:
    """The state of the generator, which is the CPU's, is saved and put back by the graphs."""

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            lambda x, w: F.dropout((x @ w).relu(), 0.5), x, weight, use_reentrant=False
        )

    def step(function: Any, device: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        given = [t.to(device).requires_grad_() for t in (torch.ones(4, 8), torch.ones(8, 8))]
        result = function(*given).sin()
        found = [result, *torch.autograd.grad(result.sum(), given)]
        return [*(t.detach().cpu() for t in found), torch.get_rng_state()]

    compiled, expected = torch.compile(forward, backend="npu_iree"), step(forward, "cpu")
    for _ in range(2):
        torch.testing.assert_close(step(compiled, "npu"), expected)

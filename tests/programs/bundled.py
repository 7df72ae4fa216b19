"""Models for bundles. `bundled.py JOBS` does one after the other of a JSON list of jobs.

`["save", NAME, FILE]` builds a model, calls it and saves it; `["run", NAME, FILE]` runs it from the
file, with more options as a fourth item. Each job answers with what is right, counted, warned of
and imported. Inputs and weights are the same in every process.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parent.parent))

import npu_iree
from programs.cases import Messages

Steps = Callable[[Callable[..., Any]], list[torch.Tensor]]
Answer = dict[str, Any]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Net(torch.nn.Module):
    """Two layers with a host op between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        return self.second(y - torch.median(y)) * 2


class Broken(Net):
    """The same with a graph break before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(y - torch.median(y)).exp()


class Plain(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.second(torch.relu(self.first(x))))


def _mixed(x: torch.Tensor) -> torch.Tensor:
    a = torch.relu(x)
    b = torch.tanh(a)
    return torch.sigmoid(b)


def _infer(*sizes: int) -> Steps:
    """Call once for each batch size, without gradients."""

    def run(model: Callable[..., Any]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(_random(size, 8)) for size in sizes]

    return run


def _infer_other_weights(model: Any) -> list[torch.Tensor]:
    """Call a graph of one size, and it and one of any size with other weights."""
    with torch.no_grad():
        before = model(_random(4, 8))
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        return [before, *(model(_random(size, 8)) for size in (4, 6, 9))]


def _train(model: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(_random(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in model.parameters())]


# name -> what makes the model, what is done with it
MODELS: dict[str, tuple[Callable[[], Callable[..., Any]], Steps]] = {
    "host-op": (Net, _infer(4)),
    "graph-break": (Broken, _infer(4)),
    "dynamic": (Plain, _infer_other_weights),
    "training": (Plain, _train),
    "plain": (Plain, _infer(4)),
    "other-shape": (Plain, _infer(5)),
    "refused": (lambda: _mixed, _infer(4)),
}


def result_of(steps: Steps, model: Callable[..., Any]) -> list[torch.Tensor] | str:
    try:
        return steps(model)
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        return f"{type(inner).__name__}: {inner}"


def main() -> None:
    messages = Messages()
    for package in ("lowering", "npu_iree"):
        logging.getLogger(package).addHandler(messages)
    for job in json.loads(sys.argv[1]):
        counters["npu_iree"].clear()
        messages.texts.clear()
        print(json.dumps(_done(*job) | {"warnings": messages.texts}), flush=True)
        torch._dynamo.reset()


def _done(command: str, name: str, file: str, more: Mapping[str, Any] | None = None) -> Answer:
    options = {"bundle": file, "compile": "never"} if command == "run" else {}
    build, steps = MODELS[name]
    compiled = torch.compile(build(), backend="npu_iree", options={**options, **(more or {})})
    actual, expected = result_of(steps, compiled), result_of(steps, build())
    if command == "save":
        npu_iree.save_bundle(compiled, file)
    error, away = (actual, None) if isinstance(actual, str) else ("", _away(actual, expected))
    return {
        "away": away,
        "error": error,
        "counts": dict(counters["npu_iree"]),
        "compilers": [m for m in ("torch_mlir", "iree.compiler") if m in sys.modules],
        "installed": [p for p in ("torch-mlir", "iree-base-compiler") if is_installed(p)],
    }


def _away(actual: Any, expected: Any) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(float((a - e).abs().max() / e.abs().max()) for a, e in pairs)


def is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()

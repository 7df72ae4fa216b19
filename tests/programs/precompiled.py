"""Functions for `aot_compile`. `precompiled.py JOBS` does one after the other of a JSON list.

`["save", NAME, FILE]` compiles a function or module ahead of time and saves it; `["run", NAME,
FILE]` loads and runs it. Each job answers with how far its results, what it writes and its
gradients are from eager's, and what was counted. Arguments and weights are the same in every
process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent.parent))

import npu_iree
from programs.bundled import Net, is_installed

torch._dynamo.config.enable_aot_compile = True
Arguments = Sequence[torch.Tensor]


class Counting(torch.nn.Module):
    """Writes to a buffer, and holds numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.linear(x))
        self.total.add_(y.detach().sum(0))
        return y * torch.tensor([1.0, 2.0, 3.0, 4.0]) + self.total


def merged(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute of sizes that may change; return views of an argument, too."""
    return torch.cat([x @ y, x @ y], 1).view(x.shape[0] * 2, -1)[1:], x.t(), x[1:]


def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return x * 2


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _matrices(rows: int) -> Arguments:
    return _random(rows, 8), _random(8, 5)


# name -> what makes the function, the arguments of each call (the first compiles it), their device
FUNCTIONS: dict[str, tuple[Callable[[], Callable[..., Any]], Sequence[Arguments], str]] = {
    "host-op": (Net, [(_random(4, 8),)], "cpu"),
    "dynamic": (lambda: merged, [_matrices(3), _matrices(4), _matrices(7)], "cpu"),
    "module": (Counting, [(_random(3, 8),), (_random(5, 8),)], "cpu"),
    "written": (lambda: written, [(_random(3, 8), _random(8))], "cpu"),
    "npu-written": (lambda: written, [(_random(3, 8), _random(8))], "npu"),
}


def main() -> None:
    npu_iree.register_device()
    for job in json.loads(sys.argv[1]):
        counters["npu_iree"].clear()
        print(json.dumps(_done(*job)), flush=True)
        torch._dynamo.reset()


def _done(command: str, name: str, file: str) -> dict[str, Any]:
    build, calls, device = FUNCTIONS[name]
    function, expected = build(), build()
    first, *more = [tuple(t.to(device, copy=True) for t in args) for args in calls]
    if command == "save":
        compiled: Any = torch.compile(
            function, backend="npu_iree", fullgraph=True, dynamic=bool(more)
        )
        compiled = compiled.forward if isinstance(function, torch.nn.Module) else compiled
        loaded = compiled.aot_compile((first, {}))
        loaded.save_compiled_function(file)
    else:
        with open(file, "rb") as saved:
            loaded = torch.compiler.load_compiled_function(saved)
    away = [_away(function, expected, loaded, args, device) for args in calls]
    return {
        "away": max(away),
        "counts": dict(counters["npu_iree"]),
        "installed": [p for p in ("torch-mlir", "iree-base-compiler") if is_installed(p)],
    }


def _away(function: Any, expected: Any, loaded: Any, arguments: Arguments, device: str) -> float:
    """Call both on copies; return how far anything that can be seen is from eager's."""
    is_module = isinstance(function, torch.nn.Module)
    ours = [t.to(device, copy=True) for t in arguments]
    eagers = [t.clone() for t in arguments]
    results = tree_leaves(loaded(*([function] if is_module else []), *ours))
    right = tree_leaves(expected(*eagers))
    pairs = [*zip(results, right, strict=True), *zip(ours, eagers, strict=True)]
    if is_module:
        for module, result in ((function, results[0]), (expected, right[0])):
            module.zero_grad()
            result.sum().backward()
        weights = zip(function.parameters(), expected.parameters(), strict=True)
        pairs += [(one.grad, other.grad) for one, other in weights]
        pairs += zip(function.buffers(), expected.buffers(), strict=True)
    assert all(a.stride() == e.stride() and a.device.type == device for a, e in pairs)
    return max(float((a.detach().cpu() - e.detach()).abs().max()) for a, e in pairs)


if __name__ == "__main__":
    main()

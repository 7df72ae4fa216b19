"""Small functions, each with its inputs and options: pairs that must not share an entry, and more.

As a program: `cases.py NAME... [--options=JSON]` compiles and calls them in turn, and answers with
what was right, the counters, the warnings, and what the process has imported and started.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import counters

from npu_iree.workers import compile_service

Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...], dict[str, Any]]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _times_left(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x - y) * x


def _times_right(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x - y) * y


def _renamed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`_times_left` with its arguments in the other order: the same program."""
    return (y - x) * y


def _plus_1(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _plus_100(x: torch.Tensor) -> torch.Tensor:
    return x + 100


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 3


def _mixed(x: torch.Tensor) -> torch.Tensor:
    a = torch.relu(x)
    b = torch.tanh(a)
    return torch.sigmoid(b)


def _two_regions(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(torch.median(torch.tanh(x) * 2)) + 1


def _independent(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two regions that wait for nothing of each other's: one makes, one takes a median."""
    return torch.tanh(x) * 2, torch.exp(torch.median(x)) + 1


_PAIR = (_random(4, 8), _random(4, 8) + 1)
_X, _IMAGE = _random(4, 8), _random(2, 8, 4, 4)
_NO_UKERNELS = {"flags": ["--iree-llvmcpu-enable-ukernels=none"]}

CASES: dict[str, Case] = {
    "times-left": (_times_left, _PAIR, {}),
    "times-right": (_times_right, _PAIR, {}),
    "renamed": (_renamed, _PAIR, {}),
    "plus-1": (_plus_1, (_X,), {}),
    "plus-100": (_plus_100, (_X,), {}),
    "f32": (_scaled, (_X,), {}),
    "f16": (_scaled, (_X.half(),), {}),
    "flags": (_scaled, (_X,), _NO_UKERNELS),
    "contiguous": (_scaled, (_IMAGE,), {}),
    "channels-last": (_scaled, (_IMAGE.to(memory_format=torch.channels_last),), {}),
    "rank-3": (_scaled, (_IMAGE.reshape(2, 8, 16),), {}),
    "mixed": (_mixed, (_X,), {}),
    "two-regions": (_two_regions, (_X,), {}),
    "independent": (_independent, (_X,), {}),
}


def is_right(name: str, **options: Any) -> bool:
    """Compile a case, call it twice, and compare with eager's numbers."""
    function, inputs, own = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="npu_iree", options={**own, **options})
    close = torch.testing.assert_close
    try:
        for _ in range(2):
            close(compiled(*inputs), function(*inputs), rtol=2e-3, atol=2e-3)
    except AssertionError:
        return False
    return True


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def answer(names: list[str], **options: Any) -> dict[str, Any]:
    """Run cases; return what is to be known of it."""
    messages = Messages()
    for package in ("lowering", "npu_iree"):
        logging.getLogger(package).addHandler(messages)
    counters["npu_iree"].clear()
    right = [is_right(name, **options) for name in names]
    return {
        "right": all(right),
        "counts": dict(counters["npu_iree"]),
        "started": compile_service().started,
        "compilers": [m for m in ("torch_mlir", "iree.compiler") if m in sys.modules],
        "warnings": messages.texts,
    }


def await_release() -> None:
    """Say that all is imported, and go on when a line comes in."""
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    if "--together" in sys.argv:
        await_release()
    names = [arg for arg in sys.argv[1:] if not arg.startswith("--")]
    options = [arg.partition("=")[2] for arg in sys.argv[1:] if arg.startswith("--options=")]
    print(json.dumps(answer(names, **json.loads(options[0] if options else "{}"))), flush=True)


if __name__ == "__main__":
    main()

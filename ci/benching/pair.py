"""`python -m benching.pair MODEL BATCH BACKEND OPTIONS MODE SIZES`: one model on one backend.

It builds the model, makes the first call (of inference, or a step of training: a loss, and the
gradients of all parameters), and answers with JSON lines. Then it reads commands:
`round SECONDS` (calls for about so long), `inside SECONDS` (what of these is ours), `save FILE` and
`compare FILE` (the numbers of a call), `export FOLDER` (the module and all that it takes),
`memory`; it ends with its input.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benching.backends import BACKENDS, DYNAMIC, TRAINING
from benching.models import MODELS, Call

_UNTIMED = 2  # calls of a round


class Pair:
    """A model on a backend: its call, and what can be asked of it."""

    def __init__(
        self,
        model: str,
        batch: int,
        backend: str,
        options: dict[str, Any],
        *,
        is_training: bool,
        is_dynamic: bool,
    ) -> None:
        case, self._backend = MODELS[model], BACKENDS[backend]
        module = case.build(**(case.training or {})).train() if is_training else case.build()
        kwargs = case.inputs(batch)
        self._make_ready: Callable[[], None] = lambda: case.make_ready(kwargs)
        fast: Callable[..., Any] = module
        if self._backend.name:
            chosen = {**self._backend.options, **options} or None
            dynamic = is_dynamic or None  # as PyTorch has it if nobody asks
            name = self._backend.name
            fast = torch.compile(module, backend=name, options=chosen, dynamic=dynamic)
        if is_training:
            fast = _step(module, fast)
        self._model: Call = lambda: fast(**kwargs)
        self._call: Call = case.call(fast, kwargs)

    def first(self) -> dict[str, Any]:
        """Make the first call, which compiles."""
        started = time.perf_counter()
        self._call()
        return {"first_call_s": time.perf_counter() - started, **self.memory()}

    def round(self, seconds: str) -> dict[str, Any]:
        """Call for about so long; return the milliseconds of a call.

        Others have had the caches since the last round: the first calls are not timed, as IREE's
        tool does not time its own.
        """
        for _ in range(_UNTIMED):
            self._call()
        spent, calls = 0.0, 0
        while spent < float(seconds):
            self._make_ready()
            started = time.perf_counter()
            self._model()
            spent += time.perf_counter() - started
            calls += 1
        return {"ms": spent / calls * 1e3}

    def inside(self, seconds: str) -> dict[str, Any]:
        """Call for about so long; return the milliseconds of a call that our runners take."""
        from benching.limits import stopwatch

        with stopwatch() as watch:  # which looks for the runners first
            started, calls = time.perf_counter(), 0
            while time.perf_counter() - started < float(seconds):
                self._call()
                calls += 1
        return {"ms": watch.spent / calls * 1e3}

    def memory(self, _: str = "") -> dict[str, Any]:
        """Return the peak of resident memory of this process; that of workers is their own.

        Not by `getrusage`: that begins with what the process had that started this one.
        """
        line = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return {"peak_mb": int(line[1]) / 1024 if line else None}

    def save(self, file: str) -> dict[str, Any]:
        """Keep the numbers of a call."""
        torch.save(self._results(), file)
        return {}

    def compare(self, file: str) -> dict[str, Any]:
        """Return the largest difference from kept numbers, relative to the largest of a tensor."""
        return {"difference": _difference(self._results(), torch.load(file))}

    def export(self, folder: str) -> dict[str, Any]:
        """Write the module of the only region, and all that it takes."""
        from benching.limits import export_module

        return {"module": export_module(Path(folder), self._call)}

    def _results(self) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves(_plain(self._call()))
        return [x.detach().clone() for x in leaves if isinstance(x, torch.Tensor)]


def _difference(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Compare tensor by tensor; NaN, should one have other NaNs.

    A gradient that is nothing but what the rounding of sums leaves, a thousandth of others or less,
    is relative to a thousandth of the largest of all.
    """
    floor = max((_largest(t[t.isfinite()]) for t in theirs), default=0.0) * 1e-3
    found = []
    for one, other in zip(mine, theirs, strict=True):
        if one.shape != other.shape:
            return math.nan
        same = (one == other) | (one.isnan() & other.isnan())
        scale = max(_largest(other[other.isfinite()]), floor, 1e-30)
        found.append(_largest((one - other).masked_fill(same, 0)) / scale)
    return float(torch.tensor(found or [0.0]).max())  # which keeps NaN, as Python's does not


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _step(module: torch.nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Give a step of training but its update: gradients, of the mean square of a call's result.

    For a parameter that this does not depend on, eager has none, where graphs have zeros.
    """

    def step(**kwargs: Any) -> Any:
        module.zero_grad()
        _plain(call(**kwargs)).square().mean().backward()
        found = ((p, p.grad) for p in module.parameters())
        return {"gradients": [torch.zeros_like(p) if g is None else g for p, g in found]}

    return step


def _plain(result: Any) -> Any:
    """Return what a model computes: its first result. Others are caches, which move on."""
    if isinstance(result, dict):
        return next(iter(result.values()))
    return result[0] if isinstance(result, tuple) else result


def _answer(**row: Any) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def main(model: str, batch: str, backend: str, options: str, mode: str, sizes: str) -> None:
    """Make the first call, then do what is asked for."""
    if module := BACKENDS[backend].module:
        try:
            importlib.import_module(module)
        except Exception as error:
            _answer(missing=f"{type(error).__name__}: {error}"[:300])
            return
    is_training, is_dynamic = mode == TRAINING, sizes == DYNAMIC
    with torch.set_grad_enabled(is_training):
        pair = Pair(
            model,
            int(batch),
            backend,
            json.loads(options),
            is_training=is_training,
            is_dynamic=is_dynamic,
        )
        try:
            _answer(**pair.first())
        except Exception as error:
            _answer(failed=f"{type(error).__name__}: {error}"[:300])
            return
        gc.collect()
        for line in sys.stdin:
            command, _, argument = line.strip().partition(" ")
            _answer(**getattr(pair, command)(argument))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What could be reached: IREE's own tool on the very same module; and what of a call is ours."""

from __future__ import annotations

import gc
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from npu_iree.array import DeviceArray
from npu_iree.device import DRIVER_FLAGS
from npu_iree.profiling.tools import RUNNER, find_tool, input_flags
from npu_iree.transfers import record_transfers

MODULE, WEIGHTS, ARGUMENTS = "model.vmfb", "model.irpa", "arguments.pt"


def export_module(folder: Path, call: Callable[[], Any]) -> str:
    """Write the module that a call runs, its parameters and arguments; return why not, or empty.

    The parameters are what the runner has bound, the arguments what it submits in this call.
    """
    from npu_iree.function import Function
    from npu_iree.offline.parameter_files import save_parameters

    runners = _runners()
    regions = [r for runner in runners for r in runner.executables]
    if len(regions) != 1:
        return f"the model is {len(regions)} regions"
    (runner,) = runners
    (executable,) = runner.executables.values()
    (region,) = runner.plan.regions.values()
    weights = runner._weights.bound(region.name)
    tensors = dict(zip(region.parameter_names, weights, strict=True))
    if tensors:
        save_parameters(tensors, folder / WEIGHTS)
    (folder / MODULE).write_bytes(executable.artifact.vmfb)
    taken: list[Any] = []
    original = Function.__call__

    def noting(self: Function, *args: Any, **others: Any) -> Any:
        taken[:] = args
        return original(self, *args, **others)

    Function.__call__ = noting  # type: ignore[method-assign]
    try:
        with record_transfers():  # which a call tells of handle by handle
            call()
    finally:
        Function.__call__ = original  # type: ignore[method-assign]
    values = [x.to_host() if isinstance(x, DeviceArray) else x for x in taken]
    torch.save(values, folder / ARGUMENTS)
    return ""


@dataclass
class Stopwatch:
    """Time, in seconds."""

    spent: float = 0.0


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    """Measure the time in our runners in the block: all that is ours of a call, and no guards."""
    watch = Stopwatch()

    def timed(step: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            started = time.perf_counter()
            step(*args)
            watch.spent += time.perf_counter() - started

        return run

    steps = {runner: runner._steps for runner in _runners()}
    for runner in steps:
        runner._steps = list(map(timed, runner._steps))
    try:
        yield watch
    finally:
        for runner, original in steps.items():
            runner._steps = original


def _runners() -> list[Any]:
    from npu_iree.runner import Runner

    return [o for o in gc.get_objects() if type(o) is Runner]


def benchmark_module(folder: Path, seconds: float) -> float:
    """Run `iree-benchmark-module` on an exported module; return the milliseconds of a call."""
    command = [
        find_tool(RUNNER),
        f"--module={folder / MODULE}",
        "--function=main",
        "--device=local-task",
        *DRIVER_FLAGS["local-task"],
        *input_flags(torch.load(folder / ARGUMENTS), folder),
        "--benchmark_format=json",
        f"--benchmark_min_time={seconds}s",
    ]
    if (folder / WEIGHTS).exists():
        command.append(f"--parameters=model={folder / WEIGHTS}")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout[done.stdout.index("{") :])["benchmarks"]
    scale = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}[row["time_unit"]]
    return float(row["real_time"]) * scale

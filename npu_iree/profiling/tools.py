"""IREE's own tools, run on an artifact: they record each device program of each call."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lowering.dtypes import dtype_name
from lowering.errors import first_line
from lowering.signature import mlir_type
from npu_iree.device import DRIVER_FLAGS
from npu_iree.errors import NpuIreeError, TargetError

RUNNER, READER = "iree-benchmark-module", "iree-profile"
_RECORDED = "queue-events,host-execution,executable-metadata"


def find_tool(name: str) -> str:
    """Return where a tool of IREE's runtime is: in its package, or on the PATH.

    Raises:
        NpuIreeError: it is not installed.
    """
    import iree.runtime

    packaged = Path(iree.runtime.__file__).parents[1] / "_runtime_libs"
    if found := shutil.which(name, path=str(packaged)) or shutil.which(name):
        return found
    raise NpuIreeError(
        f"there is no {name}, which comes with iree-base-runtime: install that package for this "
        "Python, or put the tool on the PATH"
    )


def record_calls(
    module: Path,
    function: str,
    values: Sequence[Any],
    *,
    driver: str,
    parameters: Path | None,
    calls: int,
    limit_s: float = 3600.0,
) -> list[dict[str, Any]]:
    """Call a function of a module in a process of its own, and record what the device does.

    Args:
        module: an artifact, or any .vmfb.
        function: its name.
        values: what it takes: numbers, and CPU tensors.
        driver: the IREE device to run on.
        parameters: the file that is bound, or None.
        calls: how many.
        limit_s: seconds that a tool may take.

    Returns:
        Records of `iree-profile export`; times are those of `time.perf_counter_ns`.

    Raises:
        NpuIreeError: a tool is missing, failed, or took too long.
        TargetError: IREE cannot record on this driver.
    """
    runner, reader = find_tool(RUNNER), find_tool(READER)
    with tempfile.TemporaryDirectory(prefix="npu-iree-") as folder:
        bundle = Path(folder) / "calls.ireeprof"
        inputs = input_flags(values, Path(folder))
        bound = [f"--parameters=model={parameters}"] if parameters is not None else []
        _run(
            [
                *(runner, f"--module={module}", f"--function={function}", f"--device={driver}"),
                *(*DRIVER_FLAGS.get(driver.partition("://")[0], ()), *bound, *inputs),
                f"--benchmark_min_time={calls}x",
                *(f"--device_profiling_mode={_RECORDED}", f"--device_profiling_output={bundle}"),
            ],
            driver,
            limit_s,
        )
        export = [reader, "export", "--format=ireeperf-jsonl", "--output=-", str(bundle)]
        text = _run(export, driver, limit_s)
    return [json.loads(line) for line in text.splitlines()]


def input_flags(values: Sequence[Any], folder: Path) -> list[str]:
    """Return what tells a tool the arguments of a call: numbers, and CPU tensors, in files."""
    return [_input(folder / f"input{i}.bin", value) for i, value in enumerate(values)]


def _input(file: Path, value: Any) -> str:
    """Write a value to a file as the tool reads it; return the flag."""
    if not isinstance(value, torch.Tensor):
        return f"--input={int(value) if isinstance(value, bool) else value}"
    dense = value.detach().cpu().contiguous()
    file.write_bytes(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
    kind = "x".join([*map(str, dense.shape), mlir_type(dtype_name(dense.dtype))])
    return f"--input={kind}=@{file}"


def _run(command: list[str], driver: str, limit_s: float) -> str:
    name = Path(command[0]).name
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise NpuIreeError(f"{name} has not ended in {limit_s:.0f} s") from error
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
    reason = first_line(said)[:400]
    if "UNIMPLEMENTED" in said:
        raise TargetError(
            f"IREE cannot record what the driver {driver} does: {reason}. Profiles are of targets "
            "that run on local-task or local-sync"
        )
    raise NpuIreeError(f"{name} failed: {reason}")

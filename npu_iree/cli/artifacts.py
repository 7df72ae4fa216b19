"""`npu-iree run`, `inspect` and `bench`: artifacts on the command line, with no compiler."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lowering.dtypes import DTYPES
from lowering.manifest import Call, Manifest
from lowering.vmfb import unpack
from npu_iree.array import DeviceArray
from npu_iree.cli.exits import telling_errors
from npu_iree.cli.inputs import (
    NONE,
    Artifact,
    AsJson,
    Entry,
    Inputs,
    Params,
    Sizes,
    Target,
    make_arguments,
    open_entry,
)
from npu_iree.errors import NpuIreeError
from npu_iree.offline.entry import LoadedEntry

console = Console()


def run_command(
    artifact: Artifact,
    inputs: Inputs = NONE,
    entry: Entry = None,
    target: Target = None,
    params: Params = None,
    sizes: Sizes = NONE,
    output: Annotated[
        Path | None, typer.Option(help="folder for one .npy a result, or a file.npz")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="how many times to call it")] = 1,
    as_json_: AsJson = False,
) -> None:
    """Run an artifact on inputs from files, and write or show its results."""
    times = []
    with telling_errors(console, as_json_=as_json_):
        function = open_entry(artifact, entry, target, params)
        arguments = make_arguments(function, inputs, sizes)
        for _ in range(repeat):
            started = time.perf_counter()
            results = function.call_flat(arguments)
            times.append(time.perf_counter() - started)
        tensors = {f"output{i}": r for i, r in enumerate(results) if isinstance(r, torch.Tensor)}
        if output is not None:
            _write(output, tensors)
    rows: list[dict[str, Any]] = [
        {"name": n, "shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
        for n, t in tensors.items()
    ]
    if as_json_:
        median = statistics.median(times) * 1e3
        console.print_json(json.dumps({"outputs": rows, "milliseconds": median}))
        return
    table = Table("result", "shape", "dtype", "least", "largest")
    for row, tensor in zip(rows, tensors.values(), strict=True):
        table.add_row(row["name"], str(row["shape"]), row["dtype"], *_extent(tensor))
    console.print(table)
    console.print(f"{statistics.median(times) * 1e3:.3f} ms a call (median of {repeat})")


def inspect_command(artifact: Artifact, as_json_: AsJson = False) -> None:
    """Show what an artifact is: signature, sizes, dispatches, parameters, where it came from."""
    with telling_errors(console, as_json_=as_json_):
        manifest, module = unpack(artifact)
        facts = {**_facts(artifact, manifest), "dispatches": _dispatches(module)}
    if as_json_:
        console.print_json(json.dumps({**facts, "manifest": json.loads(manifest.to_json())}))
        return
    for name, call in manifest.entries.items():
        console.print(_signature(name, call))
    table = Table("what", "value", show_header=False)
    for what, value in facts.items():
        table.add_row(what, escape(str(value)))
    console.print(table)


def bench_command(
    artifact: Artifact,
    inputs: Inputs = NONE,
    entry: Entry = None,
    target: Target = None,
    params: Params = None,
    sizes: Sizes = NONE,
    calls: Annotated[int, typer.Option(min=1, help="how many calls are timed")] = 100,
    in_flight: Annotated[
        int, typer.Option(min=1, help="calls under way at a time, for the throughput")
    ] = 4,
    as_json_: AsJson = False,
) -> None:
    """Time an artifact: latency of a call, and throughput with several calls in flight."""
    with telling_errors(console, as_json_=as_json_):
        function = open_entry(artifact, entry, target, params)
        arguments = make_arguments(function, inputs, sizes, drawn=True)
        for _ in range(max(2, calls // 10)):
            function.call_flat(arguments)
        times = sorted(_timed(function, arguments) for _ in range(calls))
        figures: dict[str, Any] = {
            "calls": calls,
            "latency_ms": {
                f"p{p}": times[min(calls - 1, calls * p // 100)] * 1e3 for p in (50, 90, 99)
            },
            "in_flight": in_flight,
            "calls_per_second": _throughput(function, arguments, calls, in_flight),
        }
    if as_json_:
        console.print_json(json.dumps(figures))
        return
    table = Table("figure", "value")
    for name, value in figures["latency_ms"].items():
        table.add_row(f"latency {name}", f"{value:.3f} ms")
    table.add_row(
        f"throughput, {in_flight} in flight", f"{figures['calls_per_second']:.1f} calls/s"
    )
    console.print(table)


def _write(output: Path, tensors: dict[str, torch.Tensor]) -> None:
    arrays = {name: _array(tensor) for name, tensor in tensors.items()}
    try:
        if output.suffix == ".npz":
            output.parent.mkdir(parents=True, exist_ok=True)
            np.savez(output, **arrays)
            return
        output.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            np.save(output / f"{name}.npy", array)
    except OSError as error:
        raise NpuIreeError(f"cannot write to {output}: {error}") from error


def _array(tensor: torch.Tensor) -> Any:
    """Return a tensor for NumPy, which has no bfloat16: as float32 then."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _extent(tensor: torch.Tensor) -> tuple[str, str]:
    if tensor.numel() == 0 or tensor.dtype.is_complex:
        return "", ""
    return f"{tensor.min().item():.6g}", f"{tensor.max().item():.6g}"


def _facts(artifact: Path, manifest: Manifest) -> dict[str, Any]:
    sizes = [DTYPES[p.dtype].itemsize * int(np.prod(p.shape)) for p in manifest.parameters]
    where = manifest.parameter_file or "compiled in"
    return {
        "file": f"{artifact} ({artifact.stat().st_size} bytes)",
        "parameters": f"{len(sizes)} ({sum(sizes)} bytes, {where})" if sizes else "none",
        "states": ", ".join(manifest.states) or "none",
        "target": f"{manifest.target} (driver {manifest.driver})",
        "cpu needs": " ".join(manifest.cpu_features) or "nothing particular",
        "flags": " ".join(manifest.flags),
        "compiled by": ", ".join(f"{n} {v[:12]}" for n, v in manifest.versions.items()),
        "from": ", ".join(f"{n}: {v}" for n, v in manifest.source.items()) or "unknown",
        "manifest format": manifest.format,
    }


def _dispatches(module: bytes) -> int:
    """Count the device programs in a module: IREE writes one function table entry each."""
    return len(set(re.findall(rb"\w+_dispatch_\d+", module)))


def _signature(name: str, call: Call) -> Table:
    table = Table("", "name", "what", title=f"entry point {name}", title_justify="left")
    for argument in call.arguments:
        spec = argument.spec if argument.spec is not None else f"always {argument.value!r}"
        table.add_row("input", argument.name, str(spec))
    for i, source in enumerate(call.outputs):
        what = call.function.outputs[source.index] if source.kind == "result" else source.kind
        table.add_row("result", f"output{i}", str(what))
    for symbol, (low, high) in call.symbols.items():
        table.add_row("size", symbol, f"{low} to {high}" if high is not None else f"{low} or more")
    return table


def _timed(function: LoadedEntry, arguments: list[Any]) -> float:
    started = time.perf_counter()
    function.call_flat(arguments)
    return time.perf_counter() - started


def _throughput(function: LoadedEntry, arguments: list[Any], calls: int, in_flight: int) -> float:
    """Submit calls so that several are always under way; return calls per second."""
    pending: deque[Any] = deque()
    started = time.perf_counter()
    for _ in range(calls):
        if len(pending) == in_flight:
            _wait(pending.popleft())
        pending.append(function.submit_flat(arguments))
    while pending:
        _wait(pending.popleft())
    return calls / (time.perf_counter() - started)


def _wait(results: list[Any]) -> None:
    for result in results:
        if isinstance(result, DeviceArray):
            result.wait()

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
from rich.table import Column, Table

from lowering.dtypes import DTYPES
from lowering.files import opened_atomically
from lowering.manifest import Call, Manifest
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
from npu_iree.cli.outputs import refuse_unwritable, write_json
from npu_iree.errors import NpuIreeError
from npu_iree.offline.entry import LoadedEntry
from npu_iree.offline.load import read_artifact

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
    with telling_errors(as_json_=as_json_):
        if output is not None:
            is_file = output.suffix == ".npz"
            refuse_unwritable(output if is_file else output / "output0.npy")
        function = open_entry(artifact, entry, target, params)
        arguments = make_arguments(function, inputs, sizes)
        for _ in range(repeat):
            started = time.perf_counter()
            results = function.call_flat(arguments)
            times.append(time.perf_counter() - started)
        named = {f"output{i}": result for i, result in enumerate(results)}
        if output is not None:
            _write(output, {n: r for n, r in named.items() if isinstance(r, torch.Tensor)})
    rows = [_row(name, result) for name, result in named.items()]
    if as_json_:
        median = statistics.median(times) * 1e3
        write_json({"outputs": rows, "milliseconds": median})
        return
    table = Table("result", "shape", "dtype", "least", "largest")
    for name, result in named.items():
        table.add_row(name, *map(escape, _cells(result)))
    console.print(table)
    console.print(f"{statistics.median(times) * 1e3:.3f} ms a call (median of {repeat})")


def inspect_command(artifact: Artifact, as_json_: AsJson = False) -> None:
    """Show what an artifact is: signature, sizes, dispatches, parameters, where it came from."""
    with telling_errors(as_json_=as_json_):
        manifest, module = read_artifact(artifact)
        facts = {**_facts(artifact, manifest), "dispatches": _dispatches(module)}
    if as_json_:
        write_json({**facts, "manifest": json.loads(manifest.to_json())})
        return
    for name, call in manifest.entries.items():
        console.print(_signature(name, call))
    table = Table("what", Column("value", overflow="fold"), show_header=False)
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
    with telling_errors(as_json_=as_json_):
        function = open_entry(artifact, entry, target, params)
        arguments = make_arguments(function, inputs, sizes, drawn=True)
        for _ in range(max(2, calls // 10)):
            function.call_flat(arguments)
        # Of a call that writes to the caller's memory, somebody has to wait for each.
        is_waited_for = any(target.kind == "argument" for target, _ in function.call.writes)
        times = sorted(_timed(function, arguments) for _ in range(calls))
        figures: dict[str, Any] = {
            "calls": calls,
            "latency_ms": {
                f"p{p}": times[min(calls - 1, calls * p // 100)] * 1e3 for p in (50, 90, 99)
            },
            "in_flight": 1 if is_waited_for else min(calls, in_flight),
            "calls_per_second": calls / sum(times)
            if is_waited_for
            else _throughput(function, arguments, calls, in_flight),
        }
    if as_json_:
        write_json(figures)
        return
    table = Table("figure", "value")
    for name, value in figures["latency_ms"].items():
        table.add_row(f"latency {name}", f"{value:.3f} ms")
    table.add_row(
        f"throughput, {figures['in_flight']} in flight",
        f"{figures['calls_per_second']:.1f} calls/s",
    )
    console.print(table)


def _row(name: str, result: Any) -> dict[str, Any]:
    if not isinstance(result, torch.Tensor):
        return {"name": name, "value": result}
    dtype = str(result.dtype).removeprefix("torch.")
    return {"name": name, "shape": list(result.shape), "dtype": dtype}


def _cells(result: Any) -> tuple[str, ...]:
    if not isinstance(result, torch.Tensor):
        return "", type(result).__name__, repr(result)
    return str(list(result.shape)), str(result.dtype).removeprefix("torch."), *_extent(result)


def _write(output: Path, tensors: dict[str, torch.Tensor]) -> None:
    arrays = {name: _array(tensor) for name, tensor in tensors.items()}
    try:
        if output.suffix == ".npz":
            with opened_atomically(output) as file:
                np.savez(file, **arrays)
            return
        output.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            with opened_atomically(output / f"{name}.npy") as file:
                np.save(file, array)
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
    columns = (Column(title, overflow="fold") for title in ("", "name", "what"))
    table = Table(*columns, title=escape(f"entry point {name}"), title_justify="left")
    for argument in call.arguments:
        spec = argument.spec if argument.spec is not None else f"always {argument.value!r}"
        table.add_row("input", escape(argument.name), escape(str(spec)))
    for i, source in enumerate(call.outputs):
        what = call.function.outputs[source.index] if source.kind == "result" else source.kind
        table.add_row("result", f"output{i}", str(what))
    for symbol, (low, high) in call.symbols.items():
        table.add_row(
            "size", escape(symbol), f"{low} to {high}" if high is not None else f"{low} or more"
        )
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

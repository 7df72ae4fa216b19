"""`npu-iree profile`: where the time of an artifact's calls goes, by the lines of the model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lowering.errors import shortened
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
    entry_of,
    make_arguments,
)
from npu_iree.cli.outputs import refuse_unwritable, write_json, write_text
from npu_iree.cli.progress import stage_progress
from npu_iree.offline.load import load
from npu_iree.profiling.measure import Measured, measure
from npu_iree.profiling.profile import Profile, Row
from npu_iree.profiling.trace import trace_text

console = Console()

_LINE = re.compile(r"(?P<file>.*):(?P<line>\d+) in [^:]*(: (?P<code>.*))?")
_LINES = 3
_OPS = 6
_CODE = 44
_WIDE = 120  # of the terminal, so that there is room for code


# title -> what a row has there, and how wide a terminal must be to show it.
_COLUMNS: dict[str, tuple[Callable[[Row], str], int]] = {
    "runs": (lambda row: f"{row.runs:g}", 0),
    "ms": (lambda row: f"{row.seconds * 1e3:.3f}", 0),
    "share": (lambda row: f"{row.share:.1%}", 0),
    "MB": (lambda row: _number(_moved(row), row), 100),
    "GB/s": (lambda row: _number(row.gb_per_s, row), 100),
    "GFLOP/s": (lambda row: _number(row.gflops_per_s, row), 100),
    "threads": (lambda row: f"{row.threads:.1f}" if row.is_dispatch else "", 110),
    "of the limit": (lambda row: _limit(row), 0),
}


def profile_command(
    artifact: Artifact,
    inputs: Inputs = NONE,
    entry: Entry = None,
    target: Target = None,
    params: Params = None,
    sizes: Sizes = NONE,
    calls: Annotated[int, typer.Option(min=1, help="how many calls are counted")] = 20,
    top: Annotated[int, typer.Option(min=1, help="how many rows of the table are shown")] = 15,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="a trace to open in ui.perfetto.dev")
    ] = None,
    as_json_: AsJson = False,
) -> None:
    """Show where the time of a call goes: by device program, with the lines of the model."""
    with telling_errors(as_json_=as_json_), stage_progress() as tell:
        refuse_unwritable(trace)
        tell("loading")
        program = load(artifact, target, params=params)
        function = entry_of(program, entry)
        leaves = make_arguments(function, inputs, sizes, drawn=True)
        measured = measure(program, function, leaves, calls=calls, params=params, tell=tell)
        if trace is not None:
            write_text(trace, trace_text(measured))
    if as_json_:
        write_json(measured.profile.to_json())
        return
    _print(measured, top, trace)


def _print(measured: Measured, top: int, trace: Path | None) -> None:
    profile = measured.profile
    columns = {title: cell for title, (cell, width) in _COLUMNS.items() if console.width >= width}
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("device program", overflow="fold")
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for row in profile.rows[:top]:
        name = "\n".join([escape(row.name), *(f"  {escape(line)}" for line in _computes(row))])
        table.add_row(name, *(cell(row) for cell in columns.values()))
    if rest := profile.rows[top:]:
        taken, share = sum(r.seconds for r in rest), sum(r.share for r in rest)
        whole = {"ms": f"{taken * 1e3:.3f}", "share": f"{share:.1%}"}
        table.add_row(f"{len(rest)} more", *(whole.get(title, "") for title in columns))
    console.print(table)
    for line in _notes(profile):
        console.print(line, highlight=False)
    if len(columns) < len(_COLUMNS):
        console.print("a wider terminal shows bytes, rates and threads; so does --json")
    if trace is not None:
        console.print(escape(f"trace: {trace} (open it in https://ui.perfetto.dev)"))


def _moved(row: Row) -> float | None:
    return row.nbytes * row.runs / 1e6 if row.nbytes is not None else None


def _limit(row: Row) -> str:
    return f"{row.of_limit:.0%} {row.limit}" if row.of_limit is not None else "-"


def _number(value: float | None, row: Row) -> str:
    if value is None:
        return "unknown" if row.is_dispatch else ""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _computes(row: Row) -> list[str]:
    """Return what a device program computes: its ops, and the lines that they are from."""
    if not row.ops:
        return ["unknown"] if row.is_dispatch else []
    names = list(dict.fromkeys(_bare(op) for op, _ in row.ops))
    lines = list(dict.fromkeys(_short(line) for _, line in row.ops if line))
    ops = ", ".join(shortened(names, _OPS, "{} more"))
    return [ops, *shortened(lines, _LINES, "{} more lines")]


def _bare(op: str) -> str:
    """Return `mm` of `aten.mm.default`."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def _short(line: str) -> str:
    """Return `file:line  code`, the file as seen from the working folder or where packages are."""
    found = _LINE.fullmatch(line)
    if found is None:
        return line
    path, here = Path(found["file"]), Path.cwd()
    if path.is_relative_to(here):
        file = os.path.relpath(path, here)
    else:
        file = str(path).rpartition(f"{os.sep}site-packages{os.sep}")[2]
    code = (found["code"] or "") if console.width >= _WIDE else ""
    shown = code if len(code) <= _CODE else f"{code[: _CODE - 3]}..."
    return f"{file}:{found['line']}  {shown}".rstrip()


def _notes(profile: Profile) -> list[str]:
    rates = profile.rates
    notes = [
        f"a call: {profile.device_s * 1e3:.3f} ms of device work, {profile.between_s * 1e3:.3f} "
        f"ms between it (recorded, median of {profile.calls}); {profile.call_s * 1e3:.3f} ms in "
        "all, when nobody records",
        f"limits: {rates['read_gb_per_s']:.1f} GB/s of memory, {rates['matmul_gflops']:.0f} "
        "GFLOP/s of float32 matrix products, as PyTorch reaches them here, now. Over 100%: what "
        "is read is in a cache, or the machine was busier when its limits were measured",
    ]
    if not profile.knows_lines:
        notes.append(
            "lines, bytes and arithmetic are unknown: this artifact does not tell them. Compile it "
            "again from the model, with npu-iree compile"
        )
    return notes

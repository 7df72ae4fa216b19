"""`npu-iree conformance`: prove a target against PyTorch's own table of operators."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from npu_iree.cli.dtype import F32, DTypes
from npu_iree.cli.pattern import Filter
from npu_iree.conformance import report
from npu_iree.conformance.cases import EVERYTHING, cases
from npu_iree.conformance.run import read_journal, run_cases
from npu_iree.conformance.verdict import OUTCOMES, Verdict
from npu_iree.errors import NpuIreeError, OptionError
from npu_iree.targets import find_target

app = typer.Typer(
    no_args_is_help=True, help="Prove a target against PyTorch's own table of operators."
)
console = Console()


@app.command("ops")
def ops(
    target: Annotated[str, typer.Option(help="an installed target")] = "npu-local",
    dtype: DTypes = F32,
    filter_: Filter = EVERYTHING,
    samples: Annotated[str, typer.Option(help="sample inputs of an entry, or all")] = "4",
    device: Annotated[
        str, typer.Option(help="compile, or npu: op by op on the PyTorch device")
    ] = "compile",
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1, help="processes")] = 2,
    limit: Annotated[float, typer.Option(help="seconds that a case may take")] = 120.0,
    forward_only: Annotated[bool, typer.Option(help="compare no gradients in f32")] = False,
    journal: Annotated[
        Path | None, typer.Option(help="JSON lines; a stopped run goes on from it")
    ] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="file for all verdicts")] = None,
    junit: Annotated[Path | None, typer.Option(help="file for JUnit XML")] = None,
) -> None:
    """Run PyTorch's operator database (`op_db`) through torch.compile and compare with eager."""
    if device not in ("compile", "npu"):
        raise OptionError(f"--device is compile or npu, not {device!r}")
    find_target(target)
    count = 0 if samples == "all" else _count(samples)
    try:
        trained = () if forward_only else ("f32",)
        todo = list(cases(dtype, pattern=filter_, samples=count, backward=trained))
    except ImportError as error:
        raise NpuIreeError(f"PyTorch's operator database needs more: {error}") from error
    verdicts: list[Verdict] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("operators", total=len(todo))
        found = run_cases(
            todo, target, jobs=jobs, limit_s=limit, journal=journal, eager=device == "npu"
        )
        for verdict in found:
            verdicts.append(verdict)
            progress.update(task, advance=1, description=verdict.key)
    _write(verdicts, target, json_, junit)
    _print(verdicts)
    if any(v.outcome in report.BAD for v in verdicts):
        raise SystemExit(1)


@app.command("diff")
def diff(before: Path, after: Path) -> None:
    """Compare two runs, by their --json files or journals; exit code 1 if one got worse."""
    table = Table("case", str(before), str(after))
    rows = report.changes(_read(before), _read(after))
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table if rows else "the runs are the same")
    if any(OUTCOMES.index(b) > OUTCOMES.index(a) for _, a, b in rows if "-" not in (a, b)):
        raise SystemExit(1)


def _count(text: str) -> int:
    if not text.isdecimal() or text == "0":
        raise OptionError(f"--samples is a number above 0 or all, not {text!r}")
    return int(text)


def _write(
    verdicts: Sequence[Verdict], target: str, json_: Path | None, junit: Path | None
) -> None:
    if json_ is not None:
        json_.write_text("".join(json.dumps(asdict(v)) + "\n" for v in verdicts))
    if junit is not None:
        junit.write_text(report.junit(verdicts, target))


def _read(path: Path) -> dict[str, Verdict]:
    if not path.is_file():
        raise OptionError(f"there is no file {path}")
    return read_journal(path)


def _print(verdicts: Sequence[Verdict]) -> None:
    caption = "share: on the device; of lowered: without the cases that torch-mlir cannot lower"
    table = Table("dtype", *OUTCOMES, "share", "of lowered", caption=caption, padding=(0, 0))
    for dtype, found in report.by_dtype(verdicts).items():
        counts = Counter(v.outcome for v in found)
        shares = (f"{share:.1%}" for share in report.device_share(found))
        table.add_row(dtype, *(str(counts[o]) for o in OUTCOMES), *shares)
    for verdict in verdicts:
        if verdict.outcome in report.BAD:
            line = verdict.detail.splitlines()[0] if verdict.detail else ""
            console.print(escape(f"{verdict.outcome}: {verdict.key}: {line}"), soft_wrap=True)
    console.print(table)

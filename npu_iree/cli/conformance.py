"""`npu-iree conformance`: prove a target, op by op, and by random programs of several."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

import npu_iree
from lowering.capabilities import Capabilities, load_capabilities
from lowering.digest import sources_digest, text_digest
from lowering.key import compiler_build, package_version
from npu_iree.cli.dtype import F32, DTypes
from npu_iree.cli.inputs import whole_number
from npu_iree.cli.outputs import refuse_unwritable, write_text
from npu_iree.cli.pattern import Filter
from npu_iree.conformance import report
from npu_iree.conformance.cases import EVERYTHING, cases
from npu_iree.conformance.run import read_journal, run_cases
from npu_iree.conformance.verdict import BAD, OUTCOMES, Verdict
from npu_iree.errors import NpuIreeError, OptionError
from npu_iree.targets import find_target, package_of

app = typer.Typer(
    no_args_is_help=True,
    help="Prove a target by PyTorch's own operators, and programs of them.",
)
console = Console()
_REASONS = 5  # so many are told of why nothing ran on the device


Target = Annotated[str, typer.Option(help="an installed target")]
Device = Annotated[str, typer.Option(help="compile, or npu: op by op on the PyTorch device")]
Jobs = Annotated[int, typer.Option("-j", "--jobs", min=1, help="processes")]
Limit = Annotated[float, typer.Option(min=1, help="seconds that a case may take")]
Journal = Annotated[Path | None, typer.Option(help="JSON lines; a stopped run goes on from it")]
Json = Annotated[Path | None, typer.Option("--json", help="file for all verdicts")]
Junit = Annotated[Path | None, typer.Option(help="file for JUnit XML")]


@app.command("ops")
def ops(
    target: Target = "npu-local",
    dtype: DTypes = F32,
    filter_: Filter = EVERYTHING,
    samples: Annotated[str, typer.Option(help="sample inputs of an entry, or all")] = "4",
    device: Device = "compile",
    jobs: Jobs = 2,
    limit: Limit = 120.0,
    forward_only: Annotated[bool, typer.Option(help="compare no gradients in f32")] = False,
    journal: Journal = None,
    json_: Json = None,
    junit: Junit = None,
) -> None:
    """Run PyTorch's operator database (`op_db`) through torch.compile and compare with eager.

    Below the table are the ops that the capability table lists and the compiler refused. Exit code
    1 if a case is error, wrong, hang or crash, or none ran wholly on the device.
    """
    from npu_iree.conformance.eager import judge_eager
    from npu_iree.conformance.judge import judge, make_ready

    files = Files(journal, json_, junit)
    _check(target, device, files)
    count = 0 if samples == "all" else _count(samples)
    try:
        trained = () if forward_only else ("f32",)
        todo = list(cases(dtype, pattern=filter_, samples=count, backward=trained))
    except ImportError as error:
        raise NpuIreeError(f"PyTorch's operator database needs more: {error}") from error
    if not todo:
        raise OptionError(f"no operator matches --filter {filter_.pattern!r}")
    on_npu = device == "npu"  # there, cases share kernels: the cache stays on
    judged_by = functools.partial(judge_eager if on_npu else judge, target=target)
    judged_as: dict[str, object] = {"of": "operators", "device": device, "limit": limit}
    judged_as |= {"samples": samples, "gradients": "none" if forward_only else "f32"}
    judged_as |= _judged_on(target)
    found = run_cases(
        todo, judged_by, jobs=jobs, limit_s=limit, journal=journal, judged_as=judged_as,
        cached=on_npu, make_ready=functools.partial(make_ready, target, operators=True),
    )  # fmt: skip
    _conclude(_watched(len(todo), found), judged_as, files)


@app.command("programs")
def programs(
    target: Target = "npu-local",
    seed: Annotated[int, typer.Option(min=0, help="the first program")] = 0,
    count: Annotated[int, typer.Option(min=1, help="how many programs, a seed each")] = 100,
    dynamic: Annotated[bool, typer.Option(help="with symbols for sizes, two sizes each")] = False,
    device: Device = "compile",
    jobs: Jobs = 2,
    limit: Limit = 600.0,
    journal: Journal = None,
    json_: Json = None,
    junit: Junit = None,
) -> None:
    """Run random programs of four to twelve ops, gradients and writes in place among them.

    One that differs from eager is cut down, and its shortest form told. Exit code 1 if one is
    error, wrong, hang or crash, or none ran wholly on the device.
    """
    from npu_iree.conformance.judge import make_ready
    from npu_iree.conformance.judge_programs import judge_program
    from npu_iree.conformance.programs import draw_program

    files = Files(journal, json_, junit)
    _check(target, device, files)
    todo = [draw_program(s) for s in range(seed, seed + count)]
    judged_by = functools.partial(judge_program, target=target, device=device, dynamic=dynamic)
    judged_as: dict[str, object] = {"of": "programs", "device": device, "limit": limit}
    judged_as |= {"dynamic": dynamic, **_judged_on(target)}
    found = run_cases(
        todo, judged_by, jobs=jobs, limit_s=limit, journal=journal,
        judged_as=judged_as, cached=device == "npu",
        make_ready=functools.partial(make_ready, target, operators=False),
    )  # fmt: skip
    _conclude(_watched(len(todo), found), judged_as, files)


@app.command("diff")
def diff(before: Path, after: Path) -> None:
    """Compare two runs, by their --json files or journals.

    Exit code 1 if a case got worse or is no longer there, or a new one is bad. Between `device` and
    `idle` none is worse.
    """
    table = Table("case", str(before), str(after))
    rows = report.changes(_read(before), _read(after))
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table if rows else "the runs are the same")
    if gone := sum(b == report.ABSENT for _, _, b in rows):
        console.print(f"{gone} cases are no longer there")
    if any(report.is_worse(a, b) for _, a, b in rows):
        raise SystemExit(1)


@dataclass(frozen=True)
class Files:
    """What a run's verdicts are written to: the journal as they come, the others at the end."""

    journal: Path | None
    json: Path | None
    junit: Path | None

    def write(self, verdicts: Sequence[Verdict], judged_as: Mapping[str, object]) -> None:
        """Write what was found."""
        if self.json is not None:
            text = "".join(json.dumps(asdict(v)) + "\n" for v in verdicts)
            write_text(self.json, text)
        if self.junit is not None:
            write_text(self.junit, report.junit(verdicts, judged_as))


def _check(target: str, device: str, files: Files) -> None:
    if device not in ("compile", "npu"):
        raise OptionError(f"--device is compile or npu, not {device!r}")
    find_target(target)
    refuse_unwritable(files.journal, files.json, files.junit)


def _judged_on(target: str) -> dict[str, object]:
    """Give all of a target and of what is installed that decides verdicts."""
    found = find_target(target)
    told = json.dumps(asdict(found), sort_keys=True, default=sorted)
    return {
        "target": target,
        "package of the target": package_of(target),
        "settings of the target": text_digest(told),
        "capabilities": load_capabilities(found.compile.capabilities).digest,
        "npu_iree": sources_digest(Path(npu_iree.__file__).parent),
        "runtime": package_version("iree-base-runtime"),
        **compiler_build(),
    }


def _watched(total: int, verdicts: Iterable[Verdict]) -> list[Verdict]:
    """List verdicts as they come, the last of each case, behind a progress bar."""
    listed = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("cases", total=total)
        for verdict in verdicts:
            listed[verdict.key] = verdict
            progress.update(task, completed=len(listed), description=verdict.key)
    return [*listed.values()]


def _conclude(verdicts: Sequence[Verdict], judged_as: Mapping[str, object], files: Files) -> None:
    """Write and print what was found; exit code 1 if anything went wrong, or nothing is proven."""
    try:
        files.write(verdicts, judged_as)
    finally:
        _print(verdicts)
    target, outcomes = str(judged_as["target"]), {v.outcome for v in verdicts}
    table = load_capabilities(find_target(target).compile.capabilities)
    _print_refused(verdicts, table)
    if outcomes == {"skipped"}:
        console.print("nothing was tried: all cases are skipped")
    elif "device" not in outcomes:
        console.print(
            f"nothing is proven: no case ran wholly on the device of {target}, whose capability "
            f"table has {len(table.ops)} ops", soft_wrap=True,
        )  # fmt: skip
        for reason, count in report.host_reasons(verdicts).most_common(_REASONS):
            console.print(escape(f"  {count} on the host: {reason}"), soft_wrap=True)
    if "device" not in outcomes or not outcomes.isdisjoint(BAD):
        raise SystemExit(1)


def _print_refused(verdicts: Sequence[Verdict], table: Capabilities) -> None:
    """Print which entries of the table are wrong, as far as the compiler knows."""
    refused = report.refused_ops(verdicts)
    lines = [f"{op} [{dtype}]: {how}" for (op, dtype), how in refused.items() if op in table.ops]
    if lines:
        console.print("the capability table lists these ops, and the compiler refused them:")
    for line in sorted(lines):
        console.print(escape(f"  {line}"), soft_wrap=True)


def _count(text: str) -> int:
    if not (number := whole_number(text)):
        raise OptionError(f"--samples is a number above 0 or all, not {text!r}")
    return number


def _read(path: Path) -> dict[str, Verdict]:
    if not path.is_file():
        raise OptionError(f"there is no file {path}")
    if not (found := read_journal(path)):
        raise OptionError(f"{path} holds no verdicts: is it a --json file or a journal?")
    if unknown := {v.outcome for v in found.values()} - {*OUTCOMES}:
        raise OptionError(f"{path}: there is no outcome {', '.join(map(repr, sorted(unknown)))}")
    return found


def _print(verdicts: Sequence[Verdict]) -> None:
    caption = (
        "idle: nothing but views, moves and constants, left to the host; share: on the device, of "
        "the others; of lowered: without the cases that torch-mlir cannot lower"
    )
    table = Table("dtype", *OUTCOMES, "share", "of lowered", caption=caption, padding=(0, 0))
    for dtype, found in report.by_dtype(verdicts).items():
        counts = Counter(v.outcome for v in found)
        shares = (f"{share:.1%}" for share in report.device_share(found))
        table.add_row(dtype, *(str(counts[o]) for o in OUTCOMES), *shares)
    for verdict in verdicts:
        if verdict.outcome in (*BAD, "skipped"):
            told = escape(f"{verdict.outcome}: {verdict.key}: {verdict.detail}")
            console.print(told, soft_wrap=True)
    console.print(table)

"""`npu-iree capabilities`: what a target runs, in which dtypes, and why not the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lowering.capabilities import Capabilities, Limit, load_capabilities
from lowering.dtypes import DTYPES
from npu_iree.cli.outputs import keeping_stdout, write_json
from npu_iree.cli.pattern import Filter
from npu_iree.conformance.cases import EVERYTHING
from npu_iree.errors import OptionError
from npu_iree.targets import find_target

app = typer.Typer(
    no_args_is_help=True, help="What a target runs, in which dtypes, and why not the rest."
)
console = Console()
_FLAGS = ("empty", "scalar", "dynamic")  # of a limit: what its tensors must be


@dataclass(frozen=True)
class Row:
    """What a table says of one op.

    Attributes:
        op: its name with the overload.
        dtypes: in which it runs on the device, in the order of `lowering.dtypes`.
        host: what it does not run on, and why; empty if there is nothing to say.
        limits: the cases that it does not run.
    """

    op: str
    dtypes: tuple[str, ...]
    host: str
    limits: tuple[Limit, ...] = ()

    @property
    def text(self) -> tuple[str, str, str]:
        """The row as it is shown."""
        return self.op, " ".join(self.dtypes) or "-", self.host

    def json(self) -> dict[str, object]:
        """Return the row as plain data."""
        limits = [
            {name: getattr(limit, name) for name in _FLAGS}
            | {"dtypes": sorted(limit.dtypes), "longer_than": limit.longer_than}
            | {"reason": limit.reason}
            for limit in self.limits
        ]
        return {"op": self.op, "dtypes": list(self.dtypes), "host": self.host, "limits": limits}


@app.command("show")
def show(
    table: Annotated[str, typer.Argument(help="an installed target, or a TOML file")] = "npu-local",
    filter_: Filter = EVERYTHING,
    form: Annotated[Literal["table", "markdown", "json"], typer.Option("--format")] = "table",
) -> None:
    """Show a capability table: op, the dtypes it runs in on the device, what runs on the host."""
    with keeping_stdout(is_data=form != "table"):
        rows = [row for row in table_rows(_load(table)) if filter_.search(row.op)]
    if form == "json":
        write_json([row.json() for row in rows])
    elif form == "markdown":
        typer.echo(markdown(table, rows), nl=False)
    else:
        _print(("op", "on the device in", "on the host"), [row.text for row in rows])


@app.command("diff")
def diff(
    before: Annotated[str, typer.Argument(help="an installed target, or a TOML file")],
    after: Annotated[str, typer.Argument(help="an installed target, or a TOML file")],
) -> None:
    """Compare two capability tables; exit code 1 if the second runs less."""
    one = {row.op: row for row in table_rows(_load(before))}
    other = {row.op: row for row in table_rows(_load(after))}
    changed = [
        (op, one.get(op, Row(op, (), "not in the table")), other.get(op, Row(op, (), "not there")))
        for op in sorted(one.keys() | other.keys())
        if one.get(op) != other.get(op)
    ]
    if not changed:
        console.print("the tables say the same")
        return
    lost = {op for op, a, b in changed if _runs_less(a, b)}
    rows = [(op, *_change(a, b)) for op, a, b in changed]
    _print(("op", "lost", "gained", "on the host, before", "after"), rows)
    console.print(f"{len(changed)} ops differ; {len(lost)} run in fewer dtypes or cases")
    if lost:
        raise SystemExit(1)


def table_rows(capabilities: Capabilities) -> list[Row]:
    """List what a table says, op by op, by name."""
    return [_row(op, capabilities) for op in sorted({*capabilities.ops, *capabilities.host})]


def markdown(name: str, rows: Sequence[Row]) -> str:
    """Write rows as the page that is checked in beside the table."""
    on_device = sum(bool(row.dtypes) for row in rows)
    head = ("op", *DTYPES, "on the host")
    lines = [
        f"# What `{name}` runs",
        "",
        f"{on_device} of {len(rows)} ATen ops run on the device in at least one dtype. Ops that",
        "are not listed are decomposed into these, or run on the host.",
        f"Written by `npu-iree capabilities show {name} --format markdown`.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for row in rows:
        marks = ("●" if dtype in row.dtypes else "" for dtype in DTYPES)
        lines.append(
            f"| `{row.op}` | {' | '.join(marks)} | {row.host.replace('|', chr(92) + '|')} |"
        )
    return "\n".join(lines) + "\n"


def _row(op: str, capabilities: Capabilities) -> Row:
    if reason := capabilities.host.get(op):
        return Row(op, (), reason)
    limits = [limit for limit in capabilities.limits if not limit.ops or op in limit.ops]
    never = {name for limit in limits if _is_always(limit) for name in limit.dtypes or DTYPES}
    dtypes = tuple(name for name in DTYPES if name in capabilities.ops[op] - never)
    return Row(op, dtypes, "; ".join(map(_told, limits)), tuple(limits))


def _told(limit: Limit) -> str:
    """Say which calls a limit cuts out, and why."""
    needed = [name for name in _FLAGS if getattr(limit, name)]
    if limit.dtypes:
        needed.insert(0, " or ".join(sorted(limit.dtypes)))
    if limit.longer_than is not None:
        needed.append(f"longer than {limit.longer_than}")
    return f"if {' and '.join(needed)}: {limit.reason}" if needed else limit.reason


def _is_always(limit: Limit) -> bool:
    """Say whether a limit is one of dtypes alone, whatever the shapes."""
    return not (limit.empty or limit.scalar or limit.dynamic or limit.longer_than is not None)


def _runs_less(before: Row, after: Row) -> bool:
    """Say whether a row has fewer dtypes than before, or a limit that no limit before had in it."""
    is_new = (not any(_is_in(limit, old) for old in before.limits) for limit in after.limits)
    return bool(set(before.dtypes) - set(after.dtypes)) or (bool(before.dtypes) and any(is_new))


def _is_in(limit: Limit, other: Limit) -> bool:
    """Say whether what a limit covers of an op is covered by another one."""
    dtypes = not other.dtypes or (bool(limit.dtypes) and limit.dtypes <= other.dtypes)
    flags = [(getattr(limit, n), getattr(other, n)) for n in _FLAGS]
    lengths = limit.longer_than, other.longer_than
    is_as_long = lengths[1] is None or (lengths[0] is not None and lengths[1] <= lengths[0])
    return dtypes and is_as_long and all(needed or not others for needed, others in flags)


def _change(before: Row, after: Row) -> tuple[str, str, str, str]:
    lost = [d for d in before.dtypes if d not in after.dtypes]
    gained = [d for d in after.dtypes if d not in before.dtypes]
    hosts = ("", "") if before.host == after.host else (before.host, after.host)
    return " ".join(lost), " ".join(gained), *hosts


def _load(name: str) -> Capabilities:
    """Read the table of an installed target, or of a file."""
    if name.endswith(".toml"):
        path = Path(name).absolute()
        if not path.is_file():
            raise OptionError(f"there is no file {name}")
        return load_capabilities(str(path))
    return load_capabilities(find_target(name).compile.capabilities)


def _print(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*(Column(title, overflow="fold") for title in head))
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)

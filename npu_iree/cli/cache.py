"""`npu-iree cache`: look into the compile cache, check it, move it, shrink it."""

from __future__ import annotations

import contextlib
import random
import zipfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from lowering.archive import ArchiveLimits, open_archive
from lowering.cache import SUFFIX, ArtifactCache, Entry
from lowering.denials import DenialRecord
from lowering.files import opened_atomically, write_atomically
from lowering.pipeline import Toolchain, compile_source
from lowering.service import CompileService
from lowering.tuning import TuningRecord
from npu_iree.cli.outputs import is_writable, refuse_unwritable
from npu_iree.errors import NpuIreeError, StageError
from npu_iree.settings import Settings

app = typer.Typer(
    no_args_is_help=True, help="Look into the compile cache, check it, move it, shrink it."
)
console = Console()
_LIMITS = ArchiveLimits(members=100_000)  # a full cache of small regions


@app.command("ls")
def list_entries() -> None:
    """List the entries, the most recently used first."""
    table = Table("entry", "target", "bytes", "parameters", "tuned", "last used")
    for path, entry in _cache().entries():
        stat = path.stat()
        used = datetime.fromtimestamp(stat.st_mtime).isoformat(" ", "seconds")
        parts = entry.parts
        bound = {name for names in entry.options.parameters.values() for name in names}
        tuned = str((entry.tuning or {}).get("winner", ""))
        cells = (path.stem[:16], parts["target"], str(stat.st_size), str(len(bound)), tuned, used)
        table.add_row(*map(escape, cells))
    console.print(table)


@app.command()
def info() -> None:
    """Show where the cache is, how large it is and may become, and what it holds."""
    cache = _cache()
    sizes = [path.stat().st_size for path, _ in cache.entries()]
    table = Table("what", "value")
    is_kept = is_writable(cache.folder / "entry")
    note = "" if is_kept else " (cannot be written: nothing is kept)"
    table.add_row("folder", escape(f"{cache.folder}{note}"))
    table.add_row("entries", str(len(sizes)))
    table.add_row("bytes", f"{sum(sizes)} of at most {cache.limit_bytes}")
    table.add_row("denials", str(len(_denials().read())))
    console.print(table)


@app.command()
def why(one: str, other: str) -> None:
    """Say in which parts the keys of two entries differ; a prefix of the digest names an entry."""
    first, second = _find(one), _find(other)
    table = Table("part", one, other)
    for label in sorted({*first.parts, *second.parts}):
        if first.parts.get(label) != second.parts.get(label):
            table.add_row(label, first.parts.get(label, ""), second.parts.get(label, ""))
    console.print(table if table.row_count else "the keys are the same")


@app.command()
def tuning(prefix: str) -> None:
    """Show how the settings of an entry were chosen; a prefix of the digest names it."""
    entry = _find(prefix)
    if entry.tuning is None:
        raise NpuIreeError(f"entry {prefix} was not tuned: options={{'tune': 'quick'}} does that")
    try:
        record = TuningRecord.from_json(entry.tuning)
    except (KeyError, TypeError, ValueError) as error:
        raise NpuIreeError(f"the record of {prefix} makes no sense: {error}") from error
    table = Table("candidate", "ms", "of default", "difference", "compiled in s", "problem")
    for trial in record.trials:
        figures = (trial.ms, trial.ratio, trial.difference, trial.compile_ms / 1e3)
        cells = (f"{value:.3g}" if value is not None else "" for value in figures)
        table.add_row(trial.name, *cells, escape(trial.problem))
    console.print(table)
    calls = record.pays_back_calls
    pays = f", won back after {calls} calls" if calls is not None else ""
    console.print(
        f"{record.level}: {record.winner} was taken; noise {record.noise:.1%}, "
        f"cost {record.cost_ms / 1e3:.1f} s{pays}"
    )


@app.command()
def verify(
    sample: int = typer.Option(4, min=0, help="how many entries to compile again; 0: all"),
    seed: int = typer.Option(0, help="of the random choice"),
) -> None:
    """Compile a sample of entries again and compare; exit code 1 if one differs.

    That happens in worker processes with limits: a crash of the compiler is a failure of the entry.
    """
    cache = _cache()
    entries = list(cache.entries())
    chosen = random.Random(seed).sample(entries, min(sample or len(entries), len(entries)))
    damaged = cache.damaged()
    for path in damaged:
        console.print(f"{path.stem[:16]} is damaged; it is rebuilt when it is needed")
    wrong = 0
    with _toolchain() as toolchain:
        for path, entry in track(chosen, "compiling again", console=console, transient=True):
            if problem := _why_wrong(entry, toolchain):
                wrong += 1
                console.print(f"{path.stem[:16]} {escape(problem)}")
    console.print(f"{len(chosen) - wrong} of {len(chosen)} entries are what they should be")
    raise typer.Exit(code=bool(wrong or damaged))


@app.command()
def prune(
    limit_bytes: int = typer.Option(None, min=0, help="by default the cache's own limit"),
) -> None:
    """Remove the least recently used entries until the rest fits."""
    removed = _cache().prune(limit_bytes)
    console.print(f"removed {len(removed)} entries")


@app.command()
def clear() -> None:
    """Remove all entries and denials."""
    removed = _cache().clear()
    _denials().path.unlink(missing_ok=True)
    console.print(f"removed {removed} entries and the denial record")


@app.command("export")
def export_entries(file: Path) -> None:
    """Write all entries and denials into one zip file."""
    refuse_unwritable(file)
    cache, denials = _cache(), _denials()
    entries = list(cache.entries())
    try:
        with (
            opened_atomically(file) as whole,
            zipfile.ZipFile(whole, "w", strict_timestamps=False) as archive,
        ):
            for path, _ in entries:
                archive.write(path, f"artifacts/{path.name}")
            if denials.path.exists():
                archive.write(denials.path, denials.path.name)
    except OSError as error:
        raise NpuIreeError(f"cannot write {file}: {error}") from error
    console.print(f"wrote {len(entries)} entries to {escape(str(file))}")


@app.command("import")
def import_entries(file: Path) -> None:
    """Take over the entries and denials of a zip file; what is damaged is left out.

    Entries are machine code, which runs here: take over only those of people whose programs you
    would run.
    """
    cache, taken = _cache(), 0
    with open_archive(file, _LIMITS) as archive:
        for name in archive.names():
            if name.endswith(SUFFIX):
                taken += _take_over(cache, archive.read(name), name)
            elif name == _denials().path.name:
                _take_over_denials(archive.read(name))
    console.print(f"took over {taken} entries")


@app.command("denials")
def list_denials() -> None:
    """List what the compiler has refused, and where it can be repeated."""
    table = Table()
    for title in ("op", "target", "why", "where", "repro"):
        table.add_column(title, overflow="fold")
    for denial in _denials().read().values():
        what = denial.op or f"a region, taken in {len(denial.parts)} parts"
        cells = (what, denial.target, denial.reason, denial.where, denial.repro)
        table.add_row(*map(escape, cells))
    console.print(table)


def _cache() -> ArtifactCache:
    settings = Settings.read()
    if settings.cache is None:
        raise NpuIreeError("the cache is off (NPU_IREE_CACHE=off)")
    if settings.cache.exists() and not settings.cache.is_dir():
        raise NpuIreeError(f"{settings.cache} is no folder (NPU_IREE_CACHE)")
    return ArtifactCache(settings.cache, settings.cache_limit_bytes)


def _denials() -> DenialRecord:
    return DenialRecord(_cache().folder / "denials.json")


def _find(prefix: str) -> Entry:
    found = [entry for path, entry in _cache().entries() if path.name.startswith(prefix)]
    if len(found) != 1:
        raise NpuIreeError(f"{len(found)} entries begin with {prefix!r}; see `npu-iree cache ls`")
    return found[0]


def _take_over(cache: ArtifactCache, data: bytes, name: str) -> bool:
    try:
        entry = Entry.from_bytes(data)
    except ValueError as error:
        console.print(escape(f"{name} is left out: {error}"))
        return False
    try:
        cache.path(entry.key.digest).parent.mkdir(parents=True, exist_ok=True)
        with cache.lock(entry.key):
            write_atomically(cache.path(entry.key.digest), data)
    except OSError as error:
        raise NpuIreeError(f"cannot write to {cache.folder}: {error}") from error
    return True


def _take_over_denials(data: bytes) -> None:
    record = _denials()
    try:
        record.add(list(record.parse(data.decode()).values()))
    except (ValueError, TypeError, KeyError) as error:
        console.print(escape(f"{record.path.name} is left out: {error}"))


@contextlib.contextmanager
def _toolchain() -> Iterator[Toolchain]:
    service = CompileService(size=1)
    try:
        yield Toolchain(service=service, fault=Settings.read().fault)
    finally:
        service.close()


def _why_wrong(entry: Entry, toolchain: Toolchain) -> str | None:
    try:
        vmfb = compile_source(entry.source, entry.options, toolchain)
    except StageError as error:
        return f"cannot be compiled again: {error}"
    return None if vmfb == entry.vmfb else "differs from what its source compiles to now"

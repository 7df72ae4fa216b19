"""`npu-iree compile`: models in, an artifact out, on a machine that needs no device."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from npu_iree.cli.exits import HELP, telling_errors
from npu_iree.errors import OptionError

console = Console()
err_console = Console(stderr=True)


class Params(StrEnum):
    """Where parameters go; `split` is `irpa`."""

    SPLIT = "split"
    IRPA = "irpa"
    SAFETENSORS = "safetensors"
    EMBED = "embed"


class Tune(StrEnum):
    """How many of the target's candidate settings are measured."""

    OFF = "off"
    QUICK = "quick"
    FULL = "full"


class HostOps(StrEnum):
    """Whether the host may run what the target cannot."""

    FORBID = "forbid"
    ALLOW = "allow"


NONE: list[str] = []
Tell = Callable[[str], None]


def compile_command(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="file.pt2, package.module:function or file.py:function that returns (model, "
            "example inputs), or an IR file of a stage; `name=` before it names its entry point",
            metavar="[NAME=]SOURCE",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="the artifact to write, e.g. bert.vmfb")
    ],
    target: Annotated[
        str, typer.Option(help="an installed target; no device is needed")
    ] = "npu-local",
    cpu: Annotated[
        str | None, typer.Option(help="CPU to compile for, e.g. x86-64-v3; by default this one")
    ] = None,
    dynamic: Annotated[
        list[str],
        typer.Option(
            metavar="INPUT:DIM[=MIN..MAX]", help="a size that may change from call to call"
        ),
    ] = NONE,
    params: Annotated[
        Params, typer.Option(help="parameters in a file beside the artifact, or embedded in it")
    ] = Params.SPLIT,
    stop_after: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE",
            help="write the product of this stage instead of an artifact: aten-to-torch, "
            "torch-to-linalg, linalg-to-flow or flow-to-vmfb",
        ),
    ] = None,
    flag: Annotated[list[str], typer.Option(help="one more flag for iree-compile")] = NONE,
    tune: Annotated[
        Tune, typer.Option(help="measure candidate settings on the device, and keep the best")
    ] = Tune.OFF,
    host_ops: Annotated[HostOps, typer.Option(help="allow goes with --bundle")] = HostOps.FORBID,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="write a bundle for torch.compile (.npub)")
    ] = False,
    imports: Annotated[
        list[str],
        typer.Option(
            "--import", metavar="MODULE", help="import it first; for types that a .pt2 file holds"
        ),
    ] = NONE,
    as_json_: Annotated[bool, typer.Option("--json", help="print the outcome as JSON")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="run the artifact and compare it with eager")
    ] = False,
) -> None:
    """Compile models ahead of time, into a .vmfb that runs where no compiler is installed."""
    from npu_iree.offline.sources import import_modules
    from npu_iree.offline.verify import verify_artifact

    kind = "irpa" if params is Params.SPLIT else params.value
    started = time.perf_counter()
    with telling_errors(console, as_json_=as_json_):
        _check_options(
            sources,
            stop_after=stop_after,
            cpu=cpu,
            dynamic=dynamic,
            params=params,
            bundle=bundle,
            host_ops=host_ops,
            verify=verify,
            tune=tune,
        )
        import_modules(imports)
        with _progress() as tell:
            made = _make(
                sources,
                output,
                target,
                cpu,
                dynamic,
                kind,
                stop_after,
                flag,
                tune.value,
                host_ops,
                bundle,
                tell,
            )
            if verify and not bundle:
                tell("comparing with eager")
                made["difference"] = verify_artifact(sources, output)
    made["seconds"] = round(time.perf_counter() - started, 2)
    if as_json_:
        console.print_json(json.dumps(made))
    else:
        _print(made)


compile_command.__doc__ = f"{compile_command.__doc__}\n\n{HELP}"


def _check_options(
    sources: list[str],
    *,
    stop_after: str | None,
    cpu: str | None,
    dynamic: list[str],
    params: Params,
    bundle: bool,
    host_ops: HostOps,
    verify: bool,
    tune: Tune,
) -> None:
    """Refuse options that would have no effect, before anything is compiled."""
    from lowering.pipeline import STAGES

    stages = [s.name for s in STAGES]
    if stop_after is not None and stop_after not in stages:
        raise OptionError(f"no stage {stop_after!r}; there are: {', '.join(stages)}")
    if host_ops is HostOps.ALLOW and not bundle:
        raise OptionError("an artifact has no host: --host-ops allow goes with --bundle")
    given = {
        "--stop-after": stop_after is not None,
        "--cpu": cpu is not None,
        "--dynamic": bool(dynamic),
        "--params": params is not Params.SPLIT,
        "--verify": verify,
        "--tune": tune is not Tune.OFF,
    }
    without: dict[str, tuple[str, ...]] = {}
    if bundle:
        without["a bundle"] = ("--stop-after", "--cpu", "--params")
    if stop_after is not None:
        without["a stage's product"] = ("--verify", "--params", "--tune")
    if any(source.endswith(".mlir") for source in sources):
        without["an artifact from IR"] = (
            "--stop-after",
            "--dynamic",
            "--params",
            "--verify",
            "--tune",
        )
        if len(sources) > 1 or bundle:
            raise OptionError("an IR file is compiled alone, and not into a bundle")
    for what, options in without.items():
        if useless := [option for option in options if given[option]]:
            raise OptionError(f"{what} has no {', '.join(useless)}")


def _make(
    sources: list[str],
    output: Path,
    target: str,
    cpu: str | None,
    dynamic: list[str],
    params: str,
    stage: str | None,
    flags: list[str],
    tune: str,
    host_ops: HostOps,
    bundle: bool,
    tell: Tell,
) -> dict[str, Any]:
    """Write what was asked for; return what is to be told of it."""
    from npu_iree.offline.build import BuildOptions, write_artifact, write_stage
    from npu_iree.offline.ir import write_from_ir
    from npu_iree.offline.sources import load_programs, source_record

    if bundle:
        from npu_iree.offline.bundles import write_bundle

        choices = {"target": target, "flags": flags, "tune": tune}
        choices["fallback"] = "error" if host_ops is HostOps.FORBID else "host"
        return write_bundle(sources, output, choices, dynamic=bool(dynamic))
    options = BuildOptions(
        target=target,
        cpu=cpu,
        flags=tuple(flags),
        tune=tune,
        params=params,  # type: ignore[arg-type]
        source=source_record(sources),
    )
    options.check()
    if sources[0].endswith(".mlir"):
        return _told(output, write_from_ir(Path(sources[0]), output, options))
    tell("exporting")
    programs = {}
    for source in sources:
        for name, program in load_programs(source, dynamic).items():
            if name in programs:
                raise OptionError(f"two entry points are called {name!r}; name them: a=one b=other")
            programs[name] = program
    tell("capturing")
    if stage:
        write_stage(programs, output, stage, options)
        return {"output": str(output), "bytes": output.stat().st_size, "stage": stage}
    return _told(output, write_artifact(programs, output, options))


def _told(output: Path, manifest: Any) -> dict[str, Any]:
    beside = output.parent / manifest.parameter_file if manifest.parameter_file else None
    return {
        "output": str(output),
        "bytes": output.stat().st_size,
        "target": manifest.target,
        "entries": {
            name: {"inputs": [str(a) for a in call.arguments], "outputs": len(call.outputs)}
            for name, call in manifest.entries.items()
        },
        "parameters": len(manifest.parameters),
        "parameter_file": str(beside) if beside else "",
        "parameter_bytes": beside.stat().st_size if beside else 0,
        "cpu_features": list(manifest.cpu_features),
        "flags": list(manifest.flags),
    }


def _print(made: dict[str, Any]) -> None:
    table = Table("what", "value", show_header=False)
    for name, value in made.items():
        if name == "entries":
            for entry, row in value.items():
                table.add_row(f"entry {entry}", escape("\n".join(row["inputs"])))
        elif name in ("cpu_features", "flags"):
            table.add_row(name.replace("_", " "), escape(" ".join(value)))
        elif value != "":
            table.add_row(name.replace("_", " "), escape(str(value)))
    console.print(table)


@contextlib.contextmanager
def _progress() -> Iterator[Tell]:
    """Show what is being done: in one line of a terminal, or line by line in a log."""
    if not err_console.is_terminal:
        with _telling_stages(_print_line):
            yield _print_line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err_console, transient=True) as progress:
        task = progress.add_task("starting")

        def tell(text: str) -> None:
            progress.update(task, description=text)

        with _telling_stages(tell):
            yield tell


def _print_line(text: str) -> None:
    err_console.print(escape(text), highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _telling_stages(tell: Tell) -> Iterator[None]:
    """Tell what the stages log."""
    log = logging.getLogger("lowering.pipeline")
    handler, level, propagate = _Teller(tell), log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = level not in (logging.NOTSET,) and propagate
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


class _Teller(logging.Handler):
    """Hands the stages' messages to a progress display."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(logging.DEBUG)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Show one message."""
        self._tell(record.getMessage().splitlines()[0])

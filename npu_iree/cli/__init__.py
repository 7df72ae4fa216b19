"""The command line `npu-iree`: the only part of the project that prints."""

from __future__ import annotations

import contextlib
import io
import platform
import signal
import sys
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lowering.cpu import cpu_name
from lowering.key import package_version
from npu_iree import __version__, settings
from npu_iree.cli import artifacts, cache, capabilities, conformance
from npu_iree.cli.compile import compile_command
from npu_iree.cli.exits import TOLD, exit_code
from npu_iree.cli.prebuild import prebuild_command
from npu_iree.cli.profile import profile_command
from npu_iree.targets import find_target, targets
from npu_iree.versions import VERIFIED

app = typer.Typer(
    no_args_is_help=True, help="PyTorch on an NPU: compile models, run them, prove a target."
)
app.command("compile")(compile_command)
app.command("run")(artifacts.run_command)
app.command("inspect")(artifacts.inspect_command)
app.command("bench")(artifacts.bench_command)
app.command("profile")(profile_command)
app.command("prebuild")(prebuild_command)
app.add_typer(cache.app, name="cache")
app.add_typer(capabilities.app, name="capabilities")
app.add_typer(conformance.app, name="conformance")
console = Console()


def _print_version(is_asked: bool) -> None:
    if not is_asked:
        return
    console.print(f"npu-iree {__version__}", highlight=False)
    for package, verified in VERIFIED.items():
        found = package_version(package)
        console.print(f"{package} {found} (verified: {verified})", highlight=False)
    console.print(f"Python {platform.python_version()}, {platform.platform()}", highlight=False)
    console.print(cpu_name(), highlight=False, soft_wrap=True)
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="show what is installed, and the CPU; a report of a failure needs it",
        ),
    ] = False,
) -> None:
    """Take the options that go before a command."""


@app.command("targets")
def list_targets() -> None:
    """List the installed targets."""
    table = Table("target", "driver", "small calls", "memory", "capability table")
    for name, target in sorted(targets().items()):
        small = target.inline_driver or target.driver
        table.add_row(name, target.driver, small, target.memory, target.compile.capabilities)
    console.print(table)


@app.command("settings")
def list_settings() -> None:
    """List the environment variables that are read, with their values."""
    table = Table("variable", "value", "meaning")
    for row in settings.rows():
        table.add_row(*row)
    console.print(table)


@app.command()
def demo(
    target: str = typer.Option("npu-local", help="an installed target"),
    layers: int = typer.Option(2, min=1, help="layers of the transformer"),
) -> None:
    """Compile a small transformer with one op sent to the host, and show what ran where."""
    from npu_iree.cli.demo import run_demo

    find_target(target)
    run_demo(console, target, layers)


class _SignalledError(BaseException):
    """Somebody ends the process; not `SystemExit`, which is also what a user's model may raise."""


def _end(number: int, frame: object) -> NoReturn:
    """End as after an error: what is half written goes."""
    raise _SignalledError(number)


def main() -> None:
    """Run the command line; an error is one clear message and an exit code by its kind."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what its encoding has not is a `?`
            stream.reconfigure(errors="replace")
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, _end)
    try:
        app()
    except _SignalledError as error:
        raise SystemExit(128 + error.args[0]) from error  # as a shell has it
    except TOLD as error:
        Console(stderr=True).print(
            "[bold red]error:[/]", escape(str(error)), highlight=False, soft_wrap=True
        )
        raise SystemExit(exit_code(error)) from error

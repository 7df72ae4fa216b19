"""`npu-iree compile`: models in, an artifact out, on a machine that needs no device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from npu_iree.cli.exits import HELP, telling_errors
from npu_iree.cli.outputs import write_json
from npu_iree.cli.progress import stage_progress
from npu_iree.cli.request import CompileRequest, HostOps, Params, Tune

console = Console()


NONE: list[str] = []

Sources = Annotated[
    list[str],
    typer.Argument(
        help="file.pt2, package.module:function or file.py:function that returns (model, "
        "example inputs), or an IR file of a stage, whose weights become inputs; `name=` before it "
        "names its entry point. All of them are programs, which run here: give none of people whom "
        "you do not trust",
        metavar="[NAME=]SOURCE",
    ),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="the artifact to write, e.g. bert.vmfb")
]
TargetName = Annotated[str, typer.Option(help="an installed target; no device is needed")]
Cpu = Annotated[
    str | None, typer.Option(help="CPU to compile for, e.g. x86-64-v3; by default this one")
]
Dynamic = Annotated[
    list[str],
    typer.Option(
        metavar="INPUT:DIM[=MIN..MAX]",
        help="a size that may change from call to call; with --bundle, one lets all sizes change",
    ),
]
LeastSize = Annotated[
    int,
    typer.Option(
        min=1,
        max=2,
        help="1: sizes that a .pt2 file says are 2 or more may be 1, for models that do not ask "
        "whether they are",
    ),
]
StopAfter = Annotated[
    str | None,
    typer.Option(
        metavar="STAGE",
        help="write the product of this stage instead of an artifact: aten-to-torch, "
        "torch-to-linalg, linalg-to-flow or flow-to-vmfb",
    ),
]
ParamsOption = Annotated[
    Params,
    typer.Option(help="parameters: a file beside the artifact (split is irpa), or in it (embed)"),
]
Flags = Annotated[list[str], typer.Option(help="one more flag for iree-compile")]
TuneOption = Annotated[
    Tune, typer.Option(help="measure candidate settings on the device, and keep the best")
]
HostOpsOption = Annotated[
    HostOps,
    typer.Option(
        help="ops that the target cannot run: an error, or run by PyTorch (allow, with --bundle)"
    ),
]
Bundle = Annotated[bool, typer.Option("--bundle", help="write a bundle for torch.compile (.npub)")]
Imports = Annotated[
    list[str],
    typer.Option(
        "--import",
        metavar="MODULE",
        help="import it first: for kernels that it registers, and for types that a .pt2 file holds",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result, or the error, as JSON")]
Verify = Annotated[
    bool, typer.Option("--verify", help="run the artifact and compare it with eager")
]


def compile_command(
    sources: Sources,
    output: Output,
    target: TargetName = "npu-local",
    cpu: Cpu = None,
    dynamic: Dynamic = NONE,
    least_size: LeastSize = 2,
    params: ParamsOption = Params.SPLIT,
    stop_after: StopAfter = None,
    flag: Flags = NONE,
    tune: TuneOption = Tune.OFF,
    host_ops: HostOpsOption = HostOps.FORBID,
    bundle: Bundle = False,
    imports: Imports = NONE,
    as_json_: AsJson = False,
    verify: Verify = False,
) -> None:
    """Compile models ahead of time, into a .vmfb that runs where no compiler is installed."""
    from npu_iree.offline.sources import import_modules
    from npu_iree.offline.verify import verify_artifact

    request = CompileRequest(
        sources=sources,
        output=output,
        target=target,
        cpu=cpu,
        dynamic=dynamic,
        least_size=least_size,
        params=params,
        stop_after=stop_after,
        flags=flag,
        tune=tune,
        host_ops=host_ops,
        bundle=bundle,
        verify=verify,
    )
    started = time.perf_counter()
    with telling_errors(as_json_=as_json_):
        request.check()
        import_modules(imports)
        with stage_progress() as tell:
            made = request.make(tell)
            if verify and not bundle:
                tell("comparing with eager")
                made["difference"] = verify_artifact(sources, output)
    made["seconds"] = round(time.perf_counter() - started, 2)
    if as_json_:
        write_json(made)
    else:
        _print(made)


compile_command.__doc__ = f"{compile_command.__doc__}\n\n{HELP}"


def _print(made: dict[str, Any]) -> None:
    table = Table("what", Column("value", overflow="fold"), show_header=False)
    for name, value in made.items():
        if name == "entries":
            for entry, row in value.items():
                table.add_row(f"entry {entry}", escape("\n".join(row["inputs"])))
        elif name in ("cpu_features", "flags"):
            table.add_row(name.replace("_", " "), escape(" ".join(value)))
        elif value != "":
            table.add_row(name.replace("_", " "), escape(str(value)))
    console.print(table)

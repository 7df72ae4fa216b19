"""`npu-iree prebuild`: compile the kernels of common eager ops into the cache."""

from __future__ import annotations

import logging
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from lowering.dtypes import DTYPES
from npu_iree.cli.dtype import F32, DTypes
from npu_iree.errors import OptionError
from npu_iree.settings import Settings

console = Console()


def prebuild_command(
    target: Annotated[str, typer.Option(help="an installed target")] = "npu-local",
    dtype: DTypes = F32,
    rank: Annotated[int, typer.Option(min=1, max=4, help="most dimensions of a tensor")] = 3,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1, help="ops at the same time")] = 4,
) -> None:
    """Compile the kernels of common eager ops, so that a first session on "npu" does not wait."""
    if Settings.read().cache is None:
        raise OptionError("NPU_IREE_CACHE is off, so there is nowhere to keep kernels")
    from npu_iree.torch_device.prebuild import prebuild
    from npu_iree.torch_device.registration import register_device

    register_device(target)
    logging.getLogger("npu_iree.torch_device").setLevel(logging.ERROR)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("ops", total=None)
        found = prebuild(
            [DTYPES[d] for d in dtype],
            range(1, rank + 1),
            jobs,
            lambda count: progress.update(task, completed=count),
        )
    console.print(
        f"{found.calls} calls: {found.compiled} kernels compiled, {found.on_host} on the host"
    )

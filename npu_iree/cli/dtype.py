"""The `--dtype` option of several commands: names of dtypes, `f32` unless others are given."""

from __future__ import annotations

from typing import Annotated

import typer

from lowering.dtypes import DTYPES
from npu_iree.errors import OptionError

F32 = ["f32"]


def _known(names: list[str]) -> list[str]:
    if unknown := [name for name in names if name not in DTYPES]:
        raise OptionError(f"no dtype {', '.join(unknown)}; there are {', '.join(DTYPES)}")
    return names


DTypes = Annotated[
    list[str], typer.Option("--dtype", help=f"one of {', '.join(DTYPES)}", callback=_known)
]

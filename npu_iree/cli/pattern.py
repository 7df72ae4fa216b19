"""The `--filter` option of several commands: a regular expression that a name has to hold."""

from __future__ import annotations

import re
from typing import Annotated

import typer


def _compiled(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise typer.BadParameter(f"{text!r} is no regular expression: {error}") from error


Filter = Annotated[
    re.Pattern[str],
    typer.Option(
        "--filter",
        metavar="RE",
        parser=_compiled,
        show_default=False,
        help="only names that hold this",
    ),
]

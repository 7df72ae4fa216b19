"""What a command writes at its end: files, never half there, and data on standard output."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from lowering.files import try_to_write, write_atomically
from npu_iree.errors import NpuIreeError, OptionError


@contextlib.contextmanager
def keeping_stdout(*, is_data: bool) -> Iterator[None]:
    """Send what models and packages print to standard error, if standard output is for data."""
    with contextlib.redirect_stdout(sys.stderr) if is_data else contextlib.nullcontext():
        yield


def refuse_unwritable(*paths: Path | None) -> None:
    """See that files can be written, before time is spent on what is to be in them.

    Raises:
        OptionError: one cannot.
    """
    for path in filter(None, paths):
        if not is_writable(path):
            raise OptionError(f"{path} cannot be written: it is no file in a folder of yours")


def is_writable(path: Path) -> bool:
    """Say whether a file, and the folders above it, can be written; nothing is left of the try."""
    if path.is_dir():
        return False
    try:
        try_to_write(path)
    except OSError:
        return False
    return True


def write_json(value: object) -> None:
    """Write data to standard output as JSON alone: colours, which may be forced, are no JSON."""
    typer.echo(json.dumps(value, indent=2))


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole, and the folders above it.

    Raises:
        NpuIreeError: it cannot be written.
    """
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise NpuIreeError(f"cannot write {path}: {error}") from error

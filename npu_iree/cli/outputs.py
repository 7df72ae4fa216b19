"""Files that a command writes at its end: refused before it begins, and never half there."""

from __future__ import annotations

import os
from pathlib import Path

from lowering.cache import is_written_through, write_atomically
from npu_iree.errors import NpuIreeError, OptionError


def refuse_unwritable(*paths: Path | None) -> None:
    """See that files can be written, before time is spent on what is to be in them.

    Raises:
        OptionError: one cannot.
    """
    for path in filter(None, paths):
        folder = next(p for p in path.absolute().parents if p.exists())
        asked = path if is_written_through(path) else folder
        if path.is_dir() or not (asked is path or folder.is_dir()) or not os.access(asked, os.W_OK):
            raise OptionError(f"{path} cannot be written: it is no file in a folder of yours")


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole, and the folders above it.

    Raises:
        NpuIreeError: it cannot be written.
    """
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise NpuIreeError(f"cannot write {path}: {error}") from error

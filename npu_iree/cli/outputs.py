"""Files that a command writes at its end: refused before it begins, and never half there."""

from __future__ import annotations

import os
from pathlib import Path

from lowering.cache import write_atomically
from npu_iree.errors import OptionError


def refuse_unwritable(*paths: Path | None) -> None:
    """See that files can be written, before time is spent on what is to be in them.

    Raises:
        OptionError: one cannot.
    """
    for path in filter(None, paths):
        folder = next(p for p in path.absolute().parents if p.exists())
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise OptionError(f"{path} cannot be written: it is no file in a folder of yours")


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole, and the folders above it; what is no file, as a pipe, as it is."""
    if path.exists() and not path.is_file():
        path.write_text(text)
    else:
        write_atomically(path, text.encode())

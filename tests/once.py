"""What costs a process or a compile is made once a run, by the first worker that asks for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def folder_of_run(factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all workers of this run share."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder of this run by name; the first who asks for it lets `make` fill it."""
    folder = folder_of_run(factory) / name
    made = folder.with_suffix(".made")
    with FileLock(folder.with_suffix(".lock")):
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # another worker failed to make it
            folder.mkdir()
            make(folder)
            made.touch()
    return folder

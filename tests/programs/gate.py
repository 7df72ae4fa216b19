"""`gate.py write NAME...` and `gate.py lock FOLDER NAME...`: like `cases.py`, with a change.

`write` stops for ever in the middle of writing each entry, and says so with a line on its output;
`lock` leaves a file in FOLDER when it asks for the lock of an entry.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases

from lowering.cache import SUFFIX, ArtifactCache


class _Half:
    """A file that takes only half of what is written."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __enter__(self) -> _Half:
        return self

    def __exit__(self, *args: object) -> None:
        os.close(self._handle)

    def write(self, data: bytes) -> None:
        os.write(self._handle, data[: len(data) // 2])
        print(json.dumps({"stopped": "in the middle of a write"}), flush=True)
        threading.Event().wait()


def stop_in_writes() -> None:
    """Patch how this process opens a file by its number."""
    fdopen: Callable[..., Any] = os.fdopen

    def opened(handle: int, *args: Any, **kwargs: Any) -> Any:
        is_entry = SUFFIX in os.readlink(f"/proc/self/fd/{handle}")
        return _Half(handle) if is_entry else fdopen(handle, *args, **kwargs)

    os.fdopen = opened


def tell_locks(folder: Path) -> None:
    """Patch the cache of this process."""
    lock = ArtifactCache.lock

    def told(*args: Any) -> Any:
        (folder / str(os.getpid())).touch()
        return lock(*args)

    ArtifactCache.lock = told  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv.pop(1) == "write":
        stop_in_writes()
    else:
        tell_locks(Path(sys.argv.pop(1)))
    cases.main()

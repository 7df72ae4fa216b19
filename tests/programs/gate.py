"""`gate.py NAME...`: like `cases.py`, but stops in the middle of writing its first entry.

It says so with a line on its output, and goes on when a line comes in.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import cases

from lowering import cache
from lowering.cache import SUFFIX


def stop_in_write() -> None:
    """Patch the cache of this process: half of the first entry is on the disk, then it waits."""
    write_atomically = cache.write_atomically

    def write(path: Any, data: bytes) -> None:
        if not path.name.endswith(SUFFIX):
            write_atomically(path, data)
            return
        fdopen = os.fdopen

        def opened(handle: int, mode: str) -> Any:
            os.fdopen = fdopen
            os.write(handle, data[: len(data) // 2])
            print(json.dumps({"stopped": "in the middle of a write"}), flush=True)
            sys.stdin.readline()
            os.lseek(handle, 0, os.SEEK_SET)
            return fdopen(handle, mode)

        os.fdopen = opened  # type: ignore[assignment]
        write_atomically(path, data)

    cache.write_atomically = write


if __name__ == "__main__":
    stop_in_write()
    cases.main()

"""`full_disk.py NAME...`: like `cases.py`, but no file of this process may grow beyond some bytes.

A write beyond that ends half-way with an error, as on a full disk. The workers have been started
before: a linker that cannot write is another matter.
"""

from __future__ import annotations

import json
import os
import resource
import sys

import cases

LIMIT_BYTES = 300

if __name__ == "__main__":
    folder, os.environ["NPU_IREE_CACHE"] = os.environ["NPU_IREE_CACHE"], "off"
    assert cases.is_right("independent")
    os.environ["NPU_IREE_CACHE"] = folder
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
    answer = cases.answer(sys.argv[1:], compile_memory_limit_bytes=2 << 30)
    print(json.dumps(answer), flush=True)

"""`first_call.py MODEL HOW FILE`: what a model's first call costs in a fresh process.

HOW is `save` (compile, and save a bundle), `run` (from the bundle) or `aot_eager`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import npu_iree
from models.zoo import ZOO


def main() -> None:
    name, how, file = sys.argv[1:]
    (entry,) = (m for m in ZOO if m.name == name)
    model, inputs = entry.build(), entry.inputs()
    options: dict[str, Any] = {"bundle": file, "compile": "never"} if how == "run" else {}
    backend = "aot_eager" if how == "aot_eager" else "npu_iree"
    compiled = torch.compile(model, backend=backend, options=options or None)
    with torch.no_grad():
        started, cpu = time.perf_counter(), time.process_time()
        compiled(**inputs)
        times = {
            "first_call_s": time.perf_counter() - started,
            "cpu_s": time.process_time() - cpu,  # what a busy machine does not stretch
        }
    print(json.dumps(times), flush=True)
    if how == "save":
        npu_iree.save_bundle(compiled, file)


if __name__ == "__main__":
    main()

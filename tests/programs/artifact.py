"""Run artifacts where no compiler is: `artifact.py JOB.json`, answers with JSON.

A job is a list of calls: artifact, entry point, a .safetensors file of keyword arguments, and one
that gets the leaves of the result.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

import npu_iree


def main() -> None:
    programs: dict[str, npu_iree.offline.load.LoadedProgram] = {}
    kinds = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        artifact = job["artifact"]
        if artifact not in programs:
            programs[artifact] = npu_iree.load(artifact)
        result = programs[artifact][job["entry"]](**load_file(job["inputs"]))
        leaves = dict(enumerate(pytree.tree_leaves(result)))
        save_file({str(i): t.contiguous() for i, t in leaves.items()}, job["outputs"])
        keys = list(result) if isinstance(result, dict) else None
        kinds.append([type(result).__name__, keys])
    loaded = [m for m in ("torch_mlir", "iree.compiler", "transformers") if m in sys.modules]
    found = [m for m in ("torch_mlir", "iree.compiler") if importlib.util.find_spec(m)]
    print(json.dumps({"kinds": kinds, "compilers": [*loaded, *found]}))


if __name__ == "__main__":
    main()

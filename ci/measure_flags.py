"""Measure a target's candidate settings on the benchmark's models: what its choices are made from.

python ci/measure_flags.py bert resnet18 --json flags.json

Each model is tuned in full (`options={"tune": "full"}`), with few of its layers, in a process of
its own; printed is each candidate's time over the default's, or why it cannot be taken.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benching.models import MODELS
from lowering.cache import ArtifactCache
from lowering.files import write_atomically
from lowering.traits import traits_of
from npu_iree.runner import Runner


def tune(name: str, batch: int, cache: Path) -> dict[str, Any]:
    """Tune one model in this process; return what its largest region contains, and the record."""
    os.environ["NPU_IREE_CACHE"] = str(cache)
    model = MODELS[name]
    module, kwargs = model.build(**model.shallow), model.inputs(batch)
    with torch.no_grad():
        model.call(torch.compile(module, backend="npu_iree", options={"tune": "full"}), kwargs)()
    graphs = [runner.plan.regions for runner in _runners()]
    region = max((r for regions in graphs for r in regions.values()), key=lambda r: len(r.ops))
    entries = [entry for _, entry in ArtifactCache(cache).entries() if entry.tuning is not None]
    entry = max(entries, key=lambda e: len(e.source))
    return {"traits": sorted(traits_of([region.graph_module])), "record": entry.tuning}


def _runners() -> list[Any]:
    return [o for o in gc.get_objects() if type(o) is Runner]


def apart(name: str, batch: int) -> dict[str, Any]:
    """Do it in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="flags-") as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, __file__, name, "--batch", str(batch), "--here", folder]
        done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
            return {"failed": said[-1][:300]}
        return dict(json.loads(file.read_text()))


def lines(name: str, found: dict[str, Any]) -> list[str]:
    """Write what was found about a model."""
    if "failed" in found:
        return [f"{name}: {found['failed']}"]
    record = found["record"]
    head = f"{name} ({', '.join(found['traits'])}): {record['winner']}, noise {record['noise']:.2f}"
    return [head, *(f"    {_line(trial)}" for trial in record["trials"])]


def _line(trial: dict[str, Any]) -> str:
    compiled = f"{trial['compile_ms'] / 1e3:5.1f} s"
    if trial["problem"]:
        return f"{trial['name']:24} {compiled} {trial['problem'].splitlines()[0][:100]}"
    return f"{trial['name']:24} {compiled} {trial['ratio']:6.2f} {trial['ms']:9.3f} ms"


def main() -> None:
    """Measure models one after the other; keep each one's figures as soon as they are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        args.json.write_text(json.dumps(tune(args.models[0], args.batch, args.here / "cache")))
        return
    found = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for name in args.models:
        case = f"{name} x{args.batch}"
        found[case] = apart(name, args.batch)
        print("\n".join(lines(case, found[case])), flush=True)
        if args.json:
            write_atomically(args.json, json.dumps(found, indent=1).encode())


if __name__ == "__main__":
    main()

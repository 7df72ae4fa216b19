"""Load and call artifacts whose manifests lie, within a memory limit: `adversary.py FILE SEED N`.

Each is refused with one of our errors, or runs: anything else is told, and ends with code 1.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import npu_iree
from lowering.manifest import MEMBER, Manifest
from lowering.signature import ScalarSpec
from lowering.vmfb import unpack
from npu_iree.errors import ArgumentError, ArtifactError, DeviceError, TargetError

ALLOWED = (ArgumentError, ArtifactError, DeviceError, TargetError)
MEMORY_BYTES = 2 << 30  # beyond what loading a good one takes
NASTY: list[Any] = [
    *(None, True, -1, 0, 1, 2, 2**31, 2**63 - 1, 2**63, 10**30, 1e308, 0.5),
    *("", "x", "../x", "/etc/passwd", "a" * 100_000, "f32", "i64", "bool", "c64", "none"),
    *("s0", "s0**s0", "9**9**9", "2**(2**40)", "9" * 5000, "(" * 5000, "1/0", "s0//0", "1e400"),
    *("Max()", "Max(s0, 's')", "__import__('os')", "s0 if s0 else 1", "-" * 5000 + "1"),
    *([], {}, [[]], [1, 2, 3], {"a": 1}, [None] * 1000, ["argument", 0]),
    *("argument", "result", "state", "parameter", "constant", "size"),
    json.loads("[" * 200 + "]" * 200),
    '[1, {"type": "builtins.list", "context": "null", "children_spec": []}]',
    '[1, {"type": null, "context": null, "children_spec": []}]',
    "[" * 100_000,
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Give the paths of everything in a JSON value but itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(items) if isinstance(value, (dict, list)) else ():
        yield (*path, key)
        if isinstance(child, (dict, list)):
            yield from places(child, (*path, key))


def parent(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


def lie(row: dict[str, Any], draw: random.Random) -> str:
    """Change one place of a manifest; return what was done."""
    paths = [*places(row)]
    path = draw.choice(paths)
    holder, key = parent(row, path), path[-1]
    how = draw.random()
    if how < 0.1:
        holder.pop(key)
        return f"no {path}"
    if how < 0.5:  # what is somewhere else under the same name, where it may well be believed
        others = [p for p in paths if p[-1] == key and p != path] or paths
        other = draw.choice(others)
        new = copy.deepcopy(parent(row, other)[other[-1]])
    elif how < 0.6 and isinstance(holder[key], list) and holder[key]:
        items = copy.deepcopy(holder[key])
        new = draw.choice([items[1:], items + copy.deepcopy(items), items[::-1]])
    elif how < 0.7 and isinstance(holder[key], int):
        new = holder[key] + draw.choice([-1, 1, 63])
    else:
        new = copy.deepcopy(draw.choice(NASTY))
    holder[key] = new
    return f"{path} = {str(new)[:80]}"


def write(path: Path, module: bytes, text: str) -> None:
    """Write an artifact with this manifest, as `pack` does."""
    path.write_bytes(module)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr(MEMBER, text)


def call_all(path: Path, honest: Manifest) -> None:
    """Call each entry point as an honest caller would."""
    program = npu_iree.load(path)
    for name, call in honest.entries.items():
        if name in program.entries:
            leaves = [
                a.value if a.spec is None else 1 if isinstance(a.spec, ScalarSpec) else example(a)
                for a in call.arguments
            ]
            program.entries[name].call_flat(leaves)


def example(argument: Any) -> torch.Tensor:
    from lowering.dtypes import DTYPES

    shape = [s if isinstance(s, int) else 3 for s in argument.spec.shape]
    return torch.ones(shape).to(DTYPES[argument.spec.dtype])


def main() -> None:
    artifact, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    manifest, module = unpack(artifact)
    honest = json.loads(manifest.to_json())
    call_all(artifact, manifest)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    ran, failed = 0, 0
    with tempfile.TemporaryDirectory(dir=artifact.parent) as folder:
        if manifest.parameter_file:
            beside = Path(folder) / manifest.parameter_file
            beside.symlink_to(artifact.parent / manifest.parameter_file)
        path = Path(folder) / "lie.vmfb"
        before = {*Path(folder).iterdir(), path}
        for i in range(seed, seed + count):
            draw = random.Random(i)
            row = copy.deepcopy(honest)
            done = [lie(row, draw) for _ in range(draw.choice([1, 1, 1, 2, 3]))]
            write(path, module, json.dumps(row))
            if "-v" in sys.argv:
                print(i, done, file=sys.stderr, flush=True)
            try:
                call_all(path, manifest)
                ran += 1
            except ALLOWED:
                pass
            except BaseException:
                failed += 1
                print("seed", i, done, traceback.format_exc(), sep="\n", flush=True)
            assert {*Path(folder).iterdir()} <= before, done
    print(json.dumps({"ran": ran, "failed": failed, "count": count}))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

"""What imports what: the direction between the packages, and what a process must not need."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from once import made_once

ROOT = Path(__file__).parents[2]
FILES = {name: sorted((ROOT / name).rglob("*.py")) for name in ("npu_iree", "lowering")}
COMPILER_MODULES = ("torch_mlir", "iree.compiler")
# A process that imports more and more, and tells what it has loaded by then.
IMPORTS = """
import json, sys
told = {}
for names in ("npu_iree",), ("npu_iree.cli",), ("npu_iree.backend", "npu_iree.explain"):
    for name in names:
        __import__(name)
    told[names[-1]] = [*sys.modules]
import npu_iree, npu_iree.explain, npu_iree.targets
kinds = [(type(npu_iree.explain).__name__, callable(npu_iree.targets)) for _ in (1, 2)]
docs = {name: getattr(npu_iree, name).__doc__ for name in npu_iree.__all__}
print(json.dumps({"loaded": told, "kinds": kinds, "docs": docs}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What that process says."""

    def make(folder: Path) -> None:
        code = [sys.executable, "-c", IMPORTS]
        done = subprocess.run(code, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        (folder / "told.json").write_text(done.stdout)

    return json.loads((made_once(tmp_path_factory, "imports", make) / "told.json").read_text())


@pytest.mark.slow
def test_importing_loads_no_compiler(told: Any) -> None:
    last = told["loaded"]["npu_iree.explain"]
    assert {"npu_iree", "npu_iree.backend", "torch"} <= {*last}
    for name in COMPILER_MODULES:
        assert not [module for module in last if f"{module}.".startswith(f"{name}.")]


def test_a_compile_worker_loads_no_torch() -> None:
    """It would take 600 MB of what a worker may use, and most of the time until it is there."""
    stages = [path.stem for path in (ROOT / "lowering/stages").glob("*_to_*.py")]
    names = [f"lowering.stages.{name}" for name in sorted(stages) if name != "aten_to_torch"]
    imports = f"import sys, lowering.worker, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert len(names) > 2
    assert subprocess.run([sys.executable, "-c", imports], cwd=ROOT).returncode == 0


def test_the_command_line_loads_no_dynamo(told: Any) -> None:
    """It would take half of the time of `npu-iree --help`, and of a TAB."""
    assert "torch._dynamo" not in told["loaded"]["npu_iree.cli"]


def test_importing_npu_iree_loads_no_torch(told: Any) -> None:
    assert "torch" not in told["loaded"]["npu_iree"]


def test_a_module_does_not_hide_the_public_function_of_its_name(told: Any) -> None:
    assert told["kinds"] == [["function", True]] * 2


def test_every_public_name_can_be_imported(told: Any) -> None:
    assert len(told["docs"]) > 10
    assert [name for name, text in told["docs"].items() if not text] == []


def _wrong_of_lowering(path: Path) -> Iterator[str]:
    """Give what a module of `lowering` must not have: runtimes, compilers, the environment."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            is_compiler = name.startswith(COMPILER_MODULES)
            if name.startswith(("npu_iree", "iree.runtime")) or (
                is_compiler and ROOT / "lowering" / "stages" not in path.parents
            ):
                yield f"{path}: {name}"
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            yield f"{path}: {node.attr}"


def test_lowering_imports_no_runtime_and_reads_no_environment() -> None:
    assert len(FILES["lowering"]) > 100
    assert [wrong for path in FILES["lowering"] for wrong in _wrong_of_lowering(path)] == []


def test_only_settings_reads_the_environment() -> None:
    readers = [path.stem for path in FILES["npu_iree"] if "os.environ" in path.read_text()]
    assert readers == ["settings"]


def test_a_file_begins_with_its_purpose() -> None:
    first = {p: p.read_text().partition("\n")[0] for files in FILES.values() for p in files}
    assert [p for p, line in first.items() if not line.startswith('"""') or len(line) <= 20] == []

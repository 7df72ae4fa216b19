"""What imports what: the direction between the packages, and what a process must not need."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER_MODULES = ("torch_mlir", "iree.compiler")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", ["import npu_iree", "import npu_iree.backend, npu_iree.explain"])
def test_importing_loads_no_compiler(code: str) -> None:
    loaded = python(f"{code}; import sys; print(*sys.modules)").split()
    assert "npu_iree" in loaded
    for name in COMPILER_MODULES:
        assert not [module for module in loaded if f"{module}.".startswith(f"{name}.")]


def test_the_command_line_loads_no_dynamo() -> None:
    """It would take half of the time of `npu-iree --help`, and of a TAB."""
    assert "torch._dynamo" not in python("import npu_iree.cli, sys; print(*sys.modules)").split()


def test_importing_npu_iree_loads_no_torch() -> None:
    assert "torch" not in python("import npu_iree, sys; print(*sys.modules)").split()


@pytest.mark.parametrize("path", sorted((ROOT / "lowering").rglob("*.py")), ids=lambda p: p.stem)
def test_lowering_imports_no_runtime_and_reads_no_environment(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert not name.startswith(("npu_iree", "iree.runtime"))
            if name.startswith(COMPILER_MODULES):
                assert ROOT / "lowering" / "stages" in path.parents
        assert not (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))


@pytest.mark.parametrize("path", sorted((ROOT / "npu_iree").rglob("*.py")), ids=lambda p: p.stem)
def test_only_settings_reads_the_environment(path: Path) -> None:
    if path.stem != "settings":
        assert "os.environ" not in path.read_text()


@pytest.mark.parametrize(
    "path",
    [p for d in ("npu_iree", "lowering") for p in sorted((ROOT / d).rglob("*.py"))],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_a_file_begins_with_its_purpose(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith('"""')
    assert len(first) > 20


def test_a_module_does_not_hide_the_public_function_of_its_name() -> None:
    code = "import npu_iree, npu_iree.explain, npu_iree.targets\nfor _ in 1, 2:\n"
    kinds = python(code + " print(type(npu_iree.explain).__name__, callable(npu_iree.targets))")
    assert set(kinds.splitlines()) == {"function True"}


def test_every_public_name_can_be_imported() -> None:
    code = "import npu_iree\nfor name in npu_iree.__all__: print(getattr(npu_iree, name).__doc__)"
    assert "None" not in python(code).splitlines()

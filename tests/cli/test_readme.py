"""Every snippet of the README runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
# What runs around these tests: they install the project and start pytest.
AROUND = ("pip install", "python ci/check.py")


def test_the_python_snippets_run_in_their_order(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text("\n".join(text for kind, text in BLOCKS if kind == "python"))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "aten.median.default" in done.stdout
    assert "refused" not in done.stderr


COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]


@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith(AROUND)])
def test_a_command_runs(
    command: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = tmp_path_factory.getbasetemp() / "cache-of-the-readme"  # as a reader has one
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path, "NPU_IREE_CACHE": str(cache)},
    )
    assert done.returncode == 0, done.stderr


def test_files_that_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text()
    paths = re.findall(r"`((?:npu_iree|lowering|ci)/[\w/.]*)`", text)
    assert len(paths) > 15
    assert [p for p in paths if not (ROOT / p).exists()] == []

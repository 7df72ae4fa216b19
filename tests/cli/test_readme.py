"""Every snippet of the README runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from command import invoke

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
# What runs around these tests: they install the project and start pytest.
AROUND = ("pip install", "python ci/check.py")
DEMOS = [command for command in COMMANDS if command.endswith("npu-iree demo")]
OTHERS = [c for c in COMMANDS if c not in DEMOS and not c.startswith(AROUND)]
DUMPED = re.findall(r"^ +(?:dump/graph0/region0/)?(\S+\.(?:txt|mlir|vmfb|json|sh))$", README, re.M)


@pytest.fixture
def as_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, a wide terminal, and a cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.slow
def test_the_python_snippets_run_in_their_order(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text("\n".join(text for kind, text in BLOCKS if kind == "python"))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "aten.median.default" in done.stdout
    assert "refused" not in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("as_a_reader")
@pytest.mark.parametrize("command", DEMOS)
def test_the_demo_prints_the_table_and_nothing_else(command: str, tmp_path: Path) -> None:
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for text in (
        "region0",
        "aten.median.default",
        "disabled_ops",
        "demo.py:",
        "largest difference",
        "aliased",
    ):
        assert text in done.stdout
    if "NPU_IREE_DUMP=dump" in command:
        assert {f.name for f in (tmp_path / "dump/graph0/region0").iterdir()} >= {*DUMPED}


@pytest.mark.slow
@pytest.mark.usefixtures("as_a_reader", "own_pool")
@pytest.mark.parametrize("command", OTHERS)
def test_a_command_runs(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As typed, but in this process: that the script is installed is seen by the demo."""
    name, *arguments = shlex.split(command)
    assert name == "npu-iree"
    done = invoke(monkeypatch, capsys, *arguments)
    assert done.code == 0, done.err
    assert done.out


def test_the_readme_has_commands_and_names_what_is_dumped() -> None:
    assert (len(DEMOS), len(OTHERS), len(DUMPED)) == (2, 6, 7)


def test_files_that_the_readme_names_exist() -> None:
    paths = re.findall(r"`((?:npu_iree|lowering|ci)/[\w/.]*)`", README)
    assert len(paths) > 15
    assert [p for p in paths if not (ROOT / p).exists()] == []

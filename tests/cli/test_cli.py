"""The command line, as a user types it; and how its process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from either import LOCAL_FIRST

COMMAND = str(Path(sys.executable).parent / "npu-iree")


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        args, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200", **env}
    )


@pytest.mark.parametrize("target", LOCAL_FIRST)
def test_demo_prints_the_table_and_nothing_else(target: str, tmp_path: Path) -> None:
    done = run(COMMAND, "demo", "--target", target, "--layers", "1", NPU_IREE_DUMP=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for text in (
        "region0",
        "aten.median.default",
        "disabled_ops",
        "demo.py:",
        "largest difference",
    ):
        assert text in done.stdout
    assert ("staged" if target == "npu-virtual" else "aliased") in done.stdout
    assert list(tmp_path.glob("graph*/region0/repro.sh"))


def test_an_unknown_target_is_one_clear_line() -> None:
    done = run(COMMAND, "demo", "--target", "npu-locl")
    assert done.returncode == 2
    assert "Did you mean 'npu-local'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_targets_and_settings_are_listed() -> None:
    targets = run(COMMAND, "targets")
    assert targets.returncode == 0
    assert all(name in targets.stdout for name in ("npu-local", "npu-virtual", "cuda"))
    assert "NPU_IREE_DUMP" in run(COMMAND, "settings").stdout


SCRIPT = """
import torch, npu_iree
layer = torch.nn.Linear(8, 8)
compiled = torch.compile(layer, backend="npu_iree", options={"target": TARGET})
handle = npu_iree.open_device(TARGET).put(torch.ones(4))   # alive at the end
with torch.no_grad():
    kept = compiled(torch.ones(2, 8))
"""


@pytest.mark.parametrize(
    ("target", "end"),
    [
        ("npu-local", ""),
        ("npu-virtual", ""),
        ("npu-local", "raise SystemExit(0)"),
        ("npu-local", "device = npu_iree.open_device(TARGET)"),
        pytest.param("npu-virtual", "raise SystemExit(0)", marks=pytest.mark.sweep),
        pytest.param(
            "npu-virtual", "device = npu_iree.open_device(TARGET)", marks=pytest.mark.sweep
        ),
    ],
)
def test_a_process_ends_without_a_word(target: str, end: str) -> None:
    done = run(
        sys.executable,
        "-c",
        SCRIPT.replace("TARGET", repr(target)) + end.replace("TARGET", repr(target)),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_backend_needs_no_import() -> None:
    code = "import torch; print('npu_iree' in torch._dynamo.list_backends())"
    assert run(sys.executable, "-c", code).stdout.strip() == "True"

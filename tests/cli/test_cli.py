"""The command line, as a user types it; and how its process ends."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

import npu_iree
from command import Ended, invoke
from npu_iree.versions import VERIFIED

Command = Callable[..., Ended]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return lambda *args: invoke(monkeypatch, capsys, *args)


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        args, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200", **env}
    )


@pytest.mark.slow
def test_demo_tells_of_copies_to_a_memory_of_its_own(command: Command) -> None:
    done = command("demo", "--target", "npu-virtual", "--layers", 1)
    assert (done.code, done.err) == (0, "")
    assert "staged" in done.out


def test_an_unknown_target_is_one_clear_line(command: Command) -> None:
    done = command("demo", "--target", "npu-locl")
    assert done.code == 6
    assert "Did you mean 'npu-local'?" in done.err
    assert "Traceback" not in done.err


def test_targets_and_settings_are_listed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = command("targets")
    assert targets.code == 0
    assert all(name in targets.out for name in ("npu-local", "npu-virtual", "cuda"))
    assert "NPU_IREE_DUMP" in command("settings").out
    ascii_only = io.TextIOWrapper(io.BytesIO(), "ascii")
    with monkeypatch.context() as narrow:
        narrow.setattr("npu_iree.cli.console._width", 40)
        narrow.setattr(sys, "stdout", ascii_only)
        assert command("targets").code == 0
    told = run(sys.executable, "-m", "npu_iree", "--version").stdout
    assert told.startswith(f"npu-iree {npu_iree.__version__}\n")
    assert all(f"\n{package} " in told for package in VERIFIED)


SCRIPT = """
import torch
assert "npu_iree" in torch._dynamo.list_backends()   # which needs no import
layer = torch.nn.Linear(8, 8)
compiled = torch.compile(layer, backend="npu_iree", options={"target": TARGET})
with torch.no_grad():
    kept = compiled(torch.ones(2, 8))
import npu_iree
handle = npu_iree.open_device(TARGET).put(torch.ones(4))   # alive at the end
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "end"),
    [
        ("npu-local", "raise SystemExit(0)"),
        ("npu-virtual", ""),
        ("npu-local", "device = npu_iree.open_device(TARGET)"),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                ("npu-local", ""),
                ("npu-virtual", "raise SystemExit(0)"),
                ("npu-virtual", "device = npu_iree.open_device(TARGET)"),
            )
        ),
    ],
)
def test_a_process_that_knows_the_backend_by_name_ends_without_a_word(
    target: str, end: str
) -> None:
    code = (SCRIPT + end).replace("TARGET", repr(target))
    done = run(sys.executable, "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

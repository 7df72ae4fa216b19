"""The command line in a process of its own, or, much faster, in this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from npu_iree.cli import main
from runtime_env import ROOT, runtime_only_environment

_MAIN = "import sys; sys.argv[0] = 'npu-iree'; from npu_iree.cli import main; main()"


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


def start(*args: object, python: Path | None = None, **env: str) -> subprocess.Popen[str]:
    """Start `npu-iree`: by this Python, or by one that has no compiler."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)} if python is None else None
    return subprocess.Popen(
        [str(python or sys.executable), "-c", _MAIN, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**(environ or runtime_only_environment()), **env},
    )


def end(process: subprocess.Popen[str]) -> Ended:
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return Ended(process.returncode, out, err)


def invoke(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: object
) -> Ended:
    """Run `npu-iree` in this process."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["npu-iree", *map(str, args)])
    code, handler = 0, signal.getsignal(signal.SIGTERM)  # which a command sets
    try:
        main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return Ended(code, *capsys.readouterr())

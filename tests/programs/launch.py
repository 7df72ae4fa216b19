"""Start the programs of this folder, each in a process of its own; they answer with JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from runtime_env import runtime_only_environment

FOLDER = Path(__file__).parent


def start(
    program: str, *args: str, python: Path | None = None, **env: str
) -> subprocess.Popen[str]:
    """Start a program, its pipes open; with another Python, which then sees its own packages."""
    pipe = subprocess.PIPE
    own = os.environ if python is None else runtime_only_environment()
    return subprocess.Popen(
        [str(python or sys.executable), str(FOLDER / f"{program}.py"), *args],
        stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**own, **env},
    )  # fmt: skip


def start_together(commands: Sequence[Sequence[str]], **env: str) -> list[subprocess.Popen[str]]:
    """Start programs that import what they need, and then wait for `release`."""
    processes = [start(program, *args, "--together", **env) for program, *args in commands]
    for process in processes:
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
    return processes


def release(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Let processes of `start_together` go on, all at once."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def finish(process: subprocess.Popen[str], timeout_s: float = 300.0) -> list[dict[str, Any]]:
    """Wait for a program; return its answers. It must end well, and in time."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def run(program: str, *args: str, python: Path | None = None, **env: str) -> dict[str, Any]:
    """Run a program that gives one answer."""
    (answer,) = finish(start(program, *args, python=python, **env))
    return answer


def wait_until(
    is_true: Callable[[], Any], process: subprocess.Popen[str] | None = None, limit_s: float = 60.0
) -> None:
    """Look again and again until something holds, at most until the deadline."""
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not come to pass"
        if process is not None:
            try:
                code = process.wait(timeout=0.02)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"it ended with {code}: {process.communicate()}")


def processes_with(setting: str) -> list[int]:
    """Give the living processes that have `NAME=value` in their environment, workers included."""
    return [pid for pid, env in _environments() if setting.encode() in env.split(b"\0")]


def _environments() -> Iterator[tuple[int, bytes]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield int(folder.name), (folder / "environ").read_bytes()
        except OSError:
            continue

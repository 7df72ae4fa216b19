"""`npu-iree compile`, `run`, `inspect` and `bench`, as a user types them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import npu_iree
from command import Ended, end, invoke, start
from lowering.cache import ArtifactCache
from lowering.pipeline import STAGES
from lowering.tuning import TuningRecord
from npu_iree.cli import artifacts
from once import made_once
from tolerances import assert_same

Command = Callable[..., Ended]
SOURCE = """
import torch

print("imported")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
    def forward(self, x, y):
        print("called")
        return {"sum": torch.relu(self.layer(x)) + y, "size": x.shape[0]}

def model():
    print("asked")
    torch.manual_seed(0)
    return Model(), {"x": torch.ones(2, 4), "y": torch.ones(3)}
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return lambda *args: invoke(monkeypatch, capsys, *args)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `mine.py` and `mine.vmfb`, whose batch is dynamic; made by one command."""

    def make(folder: Path) -> None:
        (folder / "mine.py").write_text(SOURCE)
        dynamic = ("--dynamic", "x:0=1..9")
        source, target = f"{folder}/mine.py:model", folder / "mine.vmfb"
        made = end(start("compile", source, "-o", target, *dynamic, COLUMNS="240"))
        assert made.code == 0, made.err
        assert "entry main" in made.out
        assert "mine.irpa" in made.out

    return made_once(tmp_path_factory, "offline", make)


HELP = {
    (): [
        "compile",
        "run",
        "inspect",
        "bench",
        "profile",
        "Compile models ahead of time, into a .vmfb that",
    ],
    ("compile",): [
        *("[NAME=]SOURCE", "--output", "--target", "--cpu", "--dynamic", "INPUT:DIM[=MIN..MAX]"),
        *(
            "--params",
            "irpa",
            "safetensors",
            "embed",
            "--flag",
            "--tune",
            "--host-ops",
            "forbid",
            "allow",
        ),
        *(
            "--least-size",
            "--bundle",
            "--import",
            "--json",
            "--verify",
            "--stop-after",
            *(s.name for s in STAGES),
        ),
        *("Exit codes: 0 done; 1 another error;", "3 ops that the target cannot run;"),
    ],
    ("run",): [
        *("--input", "NAME=FILE.npy|@rand", "--output", "--repeat", "--entry", "--params"),
        *("--size", "--json", "Run an artifact on inputs from files"),
    ],
    ("inspect",): ["--json", "what npu-iree compile wrote", "Show what an artifact is"],
    ("profile",): [
        *("--input", "--calls", "--top", "--trace", "FILE.json", "--json", "--entry", "--params"),
        "Show where the time of a call goes: by device program, with the lines of the model.",
    ],
    ("bench",): ["--calls", "--in-flight", "Time an artifact: latency of a call, and throughput"],
}


@pytest.mark.parametrize("words", HELP, ids=lambda words: " ".join(words) or "all")
def test_help_reads_well_at_80_columns(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    done = command(*words, "--help")
    assert (done.code, done.err) == (0, "")
    assert all(len(line) <= 80 for line in done.out.splitlines())
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.out).split())
    for wanted in HELP[words]:
        assert wanted in text
    assert "…" not in done.out  # nothing is cut off


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_the_shell(
    command: Command, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    """Typer asks the parent process for the shell; a variable answers in its place."""
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = command("--show-completion", shell)
    assert done.code == 0, done.err
    assert "_NPU_IREE_COMPLETE" in done.out


def test_completion_gives_the_commands(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"_NPU_IREE_COMPLETE": "complete_bash", "COMP_WORDS": "npu-iree i", "COMP_CWORD": "1"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert command().out.split() == ["inspect"]


@pytest.mark.slow
def test_run_writes_each_result(command: Command, folder: Path, tmp_path: Path) -> None:
    x, y = np.full((5, 4), 0.5, np.float32), np.ones(3, np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    inputs = (f"--input=x={tmp_path}/x.npy", f"--input=y=@{tmp_path}/y.npy")
    artifact = folder / "mine.vmfb"
    done = command("run", artifact, *inputs, "--output", tmp_path / "out", "--repeat", "3")
    assert done.code == 0, done.err
    assert "median of 3" in done.out
    done = command("run", artifact, *inputs, "--output", tmp_path / "out.npz", "--json")
    assert done.json()["outputs"] == [
        {"name": "output0", "shape": [5, 3], "dtype": "float32"},
        {"name": "output1", "value": 5},
    ]
    expected = npu_iree.load(artifact)(torch.from_numpy(x), torch.from_numpy(y))
    assert expected["size"] == 5
    for found in (
        np.load(tmp_path / "out" / "output0.npy"),
        np.load(tmp_path / "out.npz")["output0"],
    ):
        assert_same(torch.from_numpy(found), expected["sum"])


def test_random_inputs_are_the_same_each_time(
    command: Command, folder: Path, tmp_path: Path
) -> None:
    inputs = ("--input=x=@rand", "--input=y=@rand", "--size", f"{symbol(command, folder)}=4")
    found = []
    for name in ("a", "b"):
        options = ("--output", tmp_path / f"{name}.npz", "--json")
        done = command("run", folder / "mine.vmfb", *inputs, *options)
        assert done.json()["outputs"][0]["shape"] == [4, 3]
        found.append(np.load(tmp_path / f"{name}.npz")["output0"])
    assert np.array_equal(*found)


def symbol(command: Command, folder: Path) -> str:
    (name,) = facts(command, folder)["manifest"]["entries"]["main"]["symbols"]
    return str(name)


def facts(command: Command, folder: Path) -> dict:
    done = command("inspect", folder / "mine.vmfb", "--json")
    assert (done.code, done.err) == (0, "")
    return done.json()


def test_inspect_tells_what_it_is_and_where_it_comes_from(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coloured = Console(force_terminal=True, color_system="standard")  # as FORCE_COLOR makes it
    monkeypatch.setattr(artifacts, "console", coloured)
    told = facts(command, folder)
    assert told["parameters"] == "2 (60 bytes, mine.irpa)"
    assert told["target"] == "npu-local (driver local-task)"
    assert told["dispatches"] >= 1
    assert "mine.py:model" in told["from"]
    assert told["manifest"]["parameters"][0]["name"] == "layer.bias"
    ops = dict(told["manifest"]["entries"]["main"]["ops"])
    assert "mine.py:" in ops["aten.relu.default"]
    done = command("inspect", folder, "--json")
    assert (done.code, done.json()["error"]) == (5, "ArtifactError")
    monkeypatch.undo()
    done = command("inspect", folder / "mine.vmfb")
    assert "entry point main" in done.out
    assert "1 to 9" in done.out


def test_bench_gives_percentiles_and_throughput(command: Command, folder: Path) -> None:
    options = ("--calls", "20", "--in-flight", "3", "--json")
    figures = command("bench", folder / "mine.vmfb", *options).json()
    assert (figures["calls"], figures["in_flight"]) == (20, 3)
    latency = figures["latency_ms"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"]
    assert figures["calls_per_second"] > 0
    few = command("bench", folder / "mine.vmfb", "--calls", "2", "--in-flight", "3").out
    assert "latency p50" in few
    assert "throughput, 2 in flight" in few, "there are no more calls"


@pytest.mark.parametrize("stage", [s.name for s in STAGES])
@pytest.mark.sweep
def test_each_stage_can_be_the_last(
    stage: str, command: Command, folder: Path, tmp_path: Path
) -> None:
    """What a stage writes, the next goes on from: `.torch.mlir`, `.linalg.mlir`, `.flow.mlir`."""
    product = next(s.product for s in STAGES if s.name == stage)
    path = tmp_path / f"mine.{product}"
    made = ("compile", f"{folder}/mine.py:model", "-o", path, "--stop-after", stage, "--json")
    done = command(*made)
    assert done.code == 0, done.err
    assert done.json()["stage"] == stage
    assert [*tmp_path.iterdir()] == [path]
    if product == "vmfb":
        return
    text = path.read_text()
    assert {"torch.mlir": "torch.aten.relu", "linalg.mlir": "linalg.generic"}.get(
        product, ""
    ) in text
    # The parameters are no constants of the IR, but arguments of its function.
    done = command("compile", path, "-o", tmp_path / "again.vmfb", "--json")
    if product == "flow.mlir":  # by now they are bound by name, from a file
        assert done.code == 7
        assert "go on from a .linalg.mlir" in done.json()["message"]
        return
    assert done.code == 0, done.out
    program = npu_iree.load(tmp_path / "again.vmfb")
    inputs = [torch.ones(a.spec.shape) for a in program.only().call.arguments]
    (found,) = program(*inputs)
    weight, bias = torch.ones(3, 4), torch.ones(3)
    assert_same(found, torch.relu(torch.ones(2, 4) @ weight.T + bias) + 1)


def test_an_artifact_from_a_dump_runs(
    command: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_IREE_DUMP", str(tmp_path / "dump"))
    done = command("compile", f"{folder}/mine.py:model", "-o", tmp_path / "a.vmfb", "--json")
    assert done.code == 0, done.err
    (dumped,) = (tmp_path / "dump").rglob("*.torch.mlir")
    assert (dumped.parent / "repro.sh").exists()
    done = command("compile", dumped, "-o", tmp_path / "b.vmfb", "--json")
    assert done.code == 0, done.out
    assert json.loads(done.out)["entries"]["main"]["inputs"][0] == "input0: 2x4xf32"


def test_a_module_of_the_current_folder_is_found_and_prints_among_no_data(
    command: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    done = command("compile", "mine:model", "-o", tmp_path / "x.vmfb", "--verify", "--json")
    assert done.code == 0, done.err
    assert all(word in done.err for word in ("asked", "called"))
    assert done.json()["difference"] < 1e-5


@pytest.mark.slow
def test_no_compiler_is_told_before_anything_is_done(
    folder: Path, tmp_path: Path, runtime_only_python: Path
) -> None:
    made = ("compile", f"{folder}/mine.py:model", "-o", tmp_path / "x.vmfb")
    done = end(start(*made, python=runtime_only_python))
    assert (done.code, done.out) == (11, "")
    assert "torch-mlir: verified 20261001, found not installed" in done.err
    assert "exporting" not in done.err


@pytest.mark.slow
def test_tuning_is_measured_kept_and_shown(
    command: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "240")
    source = (f"{folder}/mine.py:model", "-o", tmp_path / "tuned.vmfb", "--tune", "quick")
    made = command("compile", *source, "--dynamic", "x:0=1..9", "--verify", "--json")
    assert made.code == 0, made.err
    entries = list(ArtifactCache(tmp_path / "cache").entries())
    ((path, record),) = [
        (path, TuningRecord.from_json(entry.tuning)) for path, entry in entries if entry.tuning
    ]
    (taken,) = [t for t in record.trials if t.name == record.winner]
    assert tuple(made.json()["flags"]) == taken.flags
    assert [t.problem for t in record.trials] == [""] * len(record.trials)
    shown = command("cache", "tuning", path.stem)
    assert all(trial.name in shown.out for trial in record.trials)
    assert f"quick: {record.winner} was taken" in shown.out
    assert record.winner in command("cache", "ls").out
    (plain,) = [path for path, entry in entries if not entry.tuning]
    refused = command("cache", "tuning", plain.stem)
    assert (refused.code, "was not tuned" in refused.err) == (1, True)
    assert command("compile", *source, "--cpu", "x86-64-v3").code == 2


def test_nothing_half_written_is_left_by_a_command_that_is_ended(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, tempfile\n"
        "from npu_iree import cli\n"
        "def write():\n"
        "    with tempfile.TemporaryDirectory(dir=sys.argv[1]):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        signal.pause()\n"
        "cli.app = write\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())

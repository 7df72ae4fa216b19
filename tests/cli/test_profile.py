"""`npu-iree profile`, as a user types it: on the device, with IREE's own recording."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command import Ended, end, invoke, start
from lowering.manifest import Manifest
from lowering.vmfb import read_manifest, unpack
from npu_iree.errors import NpuIreeError
from npu_iree.profiling.recorded import Execution, Recorded
from npu_iree.profiling.tools import _run
from once import made_once

Command = Callable[..., Ended]
SOURCE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(32, 40)
        self.second = torch.nn.Linear(40, 24)
    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return torch.softmax(self.second(hidden), -1)

def model():
    torch.manual_seed(0)
    return Model(), {"x": torch.ones(64, 32)}
"""
LINES = {name: i for i, line in enumerate(SOURCE.splitlines(), 1) for name in (line.strip(),)}
HIDDEN = LINES["hidden = torch.relu(self.first(x))"]
RESULT = LINES["return torch.softmax(self.second(hidden), -1)"]
MATMUL = "main_dispatch_0_matmul_64x40x32_f32"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line in this process; it does not measure the machine again."""
    rates = {"matmul_gflops": 100.0, "read_gb_per_s": 10.0}
    monkeypatch.setattr("npu_iree.profiling.measure.machine_rates", lambda: rates)
    monkeypatch.setattr("npu_iree.cli.profile.console._width", 140)
    return lambda *args: invoke(monkeypatch, capsys, *args)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `mine.py`, `mine.vmfb`, and its profile: `profile.json` and `trace.json`."""

    def make(folder: Path) -> None:
        (folder / "mine.py").write_text(SOURCE)
        made = end(start("compile", f"{folder}/mine.py:model", "-o", folder / "mine.vmfb"))
        assert made.code == 0, made.err
        options = ("--calls", 5, "--trace", folder / "trace.json", "--json")
        done = end(start("profile", folder / "mine.vmfb", *options))
        assert done.code == 0, done.err
        (folder / "profile.json").write_text(done.out)

    return made_once(tmp_path_factory, "profiled", make)


@pytest.fixture
def profiled(folder: Path) -> Any:
    """What a profile tells as JSON."""
    return json.loads((folder / "profile.json").read_text())


@pytest.mark.slow
def test_the_shares_of_a_call_sum_to_one(profiled: Any) -> None:
    assert sum(row["share"] for row in profiled["rows"]) == pytest.approx(1)
    assert sum(row["seconds"] for row in profiled["rows"]) == pytest.approx(profiled["device_s"])
    assert profiled["rates"]["matmul_gflops"] > 0
    assert profiled["call_s"] > 0


def test_the_time_between_work_is_that_in_which_none_runs() -> None:
    whole = Execution("execute", "execute", 1, 0, 100, 0, 0)
    spans = ((10, 40), (20, 30), (35, 60), (90, 95))
    parts = tuple(Execution("main", "dispatch", 1, start, end, 0, 0) for start, end in spans)
    others = (Execution("alloca", "alloca", 2, 60, 90, 0, 0),)
    assert Recorded((*parts, *others), (whole,), ()).idle_ns() == [45]


def test_a_tool_that_hangs_is_ended_and_a_trace_has_a_place(
    command: Command, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(NpuIreeError, match="sleep has not ended in 0 s"):
        _run(["sleep", "60"], "local-task", 0.1)
    done = command("profile", folder / "mine.vmfb", "--trace", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "cannot be written" in done.err


def test_each_device_program_has_a_line_of_the_model(profiled: Any, folder: Path) -> None:
    programs = {row["name"]: row for row in profiled["rows"] if row["is_dispatch"]}
    assert MATMUL in programs
    for row in programs.values():
        assert row["ops"]
        for op in row["ops"]:
            assert op["where"].startswith(f"{folder}/mine.py:")
            assert f":{HIDDEN} in forward" in op["where"] or f":{RESULT} in" in op["where"]
    first = programs[MATMUL]["ops"]
    assert first[0]["op"] == "aten.mm.default"
    assert first[0]["where"].startswith(f"{folder}/mine.py:{HIDDEN} in forward")
    (softmax,) = (row for name, row in programs.items() if "rows" in name)
    assert f":{RESULT} in forward" in softmax["ops"][0]["where"]


def test_the_work_of_a_matrix_product_is_exact(profiled: Any) -> None:
    (row,) = (row for row in profiled["rows"] if row["name"] == MATMUL)
    assert row["runs"] == 1
    assert row["nbytes"] == 4 * (64 * 32 + 40 * 32 + 40 + 64 * 40)  # x, weight, bias, result
    assert row["flops"] == 2 * 64 * 40 * 32 + 64 * 40  # and the bias is added
    assert row["gflops_per_s"] == pytest.approx(row["flops"] / row["seconds"] / 1e9)
    allowed = {
        "memory": row["nbytes"] / profiled["rates"]["read_gb_per_s"] / 1e9,
        "compute": row["flops"] / profiled["rates"]["matmul_gflops"] / 1e9,
    }
    assert row["of_limit"] == pytest.approx(max(allowed.values()) / row["seconds"])
    assert allowed[row["limit"]] == max(allowed.values())


def test_the_trace_has_host_queue_transfers_and_device_programs(
    profiled: Any, folder: Path
) -> None:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[Any]] = {}
    for event in events:
        if event["ph"] != "M":
            assert event["ts"] >= 0
            found.setdefault(tracks[event["pid"], event["tid"]], []).append(event)
    assert {"host", "queue", "transfers", "host: submissions", "dispatches"} <= set(found)
    calls = [e["name"] for e in found["host"] if e["name"].startswith("call")]
    assert calls == ["call 0", "call 1", "call 2"]
    assert any("h2d of x" in e["name"] for e in found["transfers"])
    names = {(e["pid"], e["name"]) for e in found["queue"]}
    assert {(1, "mine.vmfb"), (2, "execute")} <= names
    products = [e for e in found["dispatches"] if e["name"] == MATMUL]
    assert len(products) == 5 + 2  # two to warm up
    assert products[0]["dur"] > 0
    assert f"mine.py:{HIDDEN} in forward" in products[0]["args"]["ops"][0]


def test_copies_to_a_memory_of_its_own_are_transfers_in_the_trace(
    command: Command, folder: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "traces" / "trace.json"
    options = ("--target", "npu-virtual", "--calls", 1, "--trace", trace)
    done = command("profile", folder / "mine.vmfb", *options)
    assert done.code == 0, done.err
    events = json.loads(trace.read_text())["traceEvents"]
    moves = [e for e in events if e.get("cat") == "transfers"]
    staged = [e["args"]["bytes"] for e in moves if e["name"] == "staged h2d of x"]
    assert staged == [4 * 64 * 32] * 3
    assert len([e for e in moves if e["name"] == "put x" and e["dur"] > 0]) == 3


def test_the_table_names_ops_and_lines(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)  # files are shown as seen from here, so no line of the table folds
    done = command("profile", folder / "mine.vmfb", "--calls", 3, "--top", 2)
    assert done.code == 0, done.err
    for wanted in ("device program", "of the limit", "mm, relu, add", "4 more", "GFLOP/s"):
        assert wanted in done.out
    assert f"mine.py:{HIDDEN} " in done.out
    assert str(folder) not in done.out


def test_equal_programs_of_two_files_have_lines_of_their_own(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path / "cache"))
    manifests: list[Manifest] = []
    modules: list[bytes] = []
    for name, source in {"one": SOURCE, "other": f"\n\n{SOURCE}"}.items():
        (tmp_path / f"{name}.py").write_text(source)
        made = command("compile", f"{tmp_path}/{name}.py:model", "-o", tmp_path / f"{name}.vmfb")
        assert made.code == 0, made.err
        manifest, module = unpack(tmp_path / f"{name}.vmfb")
        manifests.append(manifest)
        modules.append(module)
    assert modules[0] == modules[1]
    one, other = (m.dispatches[0].ops[0][1] for m in manifests)
    assert one.startswith(f"{tmp_path}/one.py:{HIDDEN} ")
    assert other.startswith(f"{tmp_path}/other.py:{HIDDEN + 2} ")


def test_an_artifact_that_tells_no_programs_is_profiled_and_says_so(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lowering.offline.list_dispatches", lambda *args: ())
    plain = tmp_path / "plain.vmfb"
    assert command("compile", f"{folder}/mine.py:model", "-o", plain).code == 0
    done = command("profile", plain, "--calls", 2)
    assert done.code == 0, done.err
    assert "lines, bytes and arithmetic are unknown" in done.out
    assert MATMUL in done.out


def test_a_manifest_of_before_there_were_profiles_is_read(folder: Path) -> None:
    manifest = read_manifest(folder / "mine.vmfb")
    values = json.loads(manifest.to_json())
    assert Manifest.from_json(json.dumps(values)) == manifest
    del values["dispatches"]
    assert Manifest.from_json(json.dumps(values)) == replace(manifest, dispatches=())


def test_a_missing_or_broken_artifact_is_a_clear_error(command: Command, tmp_path: Path) -> None:
    missing = command("profile", tmp_path / "missing.vmfb")
    assert (missing.code, missing.out) == (5, "")
    assert "missing.vmfb: there is no such file" in missing.err.replace("\n", "")
    (tmp_path / "broken.vmfb").write_bytes(b"not an artifact")
    broken = command("profile", tmp_path / "broken.vmfb", "--json")
    assert broken.code == 5
    assert broken.json()["error"] == "ArtifactError"


def test_a_missing_tool_is_named_with_its_package(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_iree.profiling.tools.READER", "iree-no-such-tool")
    done = command("profile", folder / "mine.vmfb", "--calls", 1)
    assert done.code == 1
    assert "no iree-no-such-tool, which comes with iree-base-runtime" in done.err


@pytest.mark.sweep
def test_what_iree_says_is_told(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_iree.profiling.tools._RECORDED", "dispatch-events")
    done = command("profile", folder / "mine.vmfb", "--calls", 1)
    assert done.code == 6
    assert "IREE cannot record what the driver local-task does" in done.err
    assert "unsupported local profiling data families" in done.err


@pytest.mark.slow
def test_no_compiler_is_needed(folder: Path, runtime_only_python: Path) -> None:
    done = end(
        start("profile", folder / "mine.vmfb", "--calls", 2, "--json", python=runtime_only_python)
    )
    assert done.code == 0, done.err
    assert MATMUL in [row["name"] for row in done.json()["rows"]]

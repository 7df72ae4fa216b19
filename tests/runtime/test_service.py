"""Compile workers: whatever happens in one, the user's call gives eager's result; healing."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import operator
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed

from lowering import own_python, pipeline
from lowering import service as service_module
from lowering.bisect import Diagnosis, diagnose
from lowering.cache import ArtifactCache
from lowering.denials import DenialRecord
from lowering.errors import CancelledError, StageError, WorkerStartError
from lowering.heal import _split
from lowering.program import Program
from lowering.service import CompileService, Limits
from lowering.stages import CompileOptions
from lowering.worker import _LENGTHS
from npu_iree import OptionError, aot_cache, toolchain
from npu_iree.options import Options
from npu_iree.report import recorded_plans
from npu_iree.settings import Settings
from programs import cases
from programs.cases import is_right
from programs.launch import finish, processes_with, release, run, start, start_together, wait_until

STAGES = ("torch-to-linalg", "linalg-to-flow", "flow-to-vmfb")
KINDS = ("abort", "segv", "hang", "memory", "error")
LIMITS = {"compile_time_limit_s": 4.0, "compile_memory_limit_bytes": 2 << 30}
OP = "aten.tanh.default"
DEFAULT_RUN = [("hang", "flow-to-vmfb"), ("memory", "flow-to-vmfb")]  # others, below, by a worker
MATRIX = [
    pytest.param(kind, stage, marks=[] if (kind, stage) in DEFAULT_RUN else [pytest.mark.sweep])
    for kind in KINDS
    for stage in STAGES
]
SMALL = "func.func @main(%0: !torch.vtensor<[2],f32>) -> !torch.vtensor<[2],f32> {{\n{}\n}}"
RELU = SMALL.format(
    "%1 = torch.aten.relu %0 : !torch.vtensor<[2],f32> -> !torch.vtensor<[2],f32>\n"
    "return %1 : !torch.vtensor<[2],f32>"
)


def fault(stage: str, kind: str, op: str = OP) -> str:
    return f"{stage}:{kind}:{op}"


@pytest.mark.parametrize("text", ["nonsense", "torch-to-linalg:abort:", "here:abort:x"])
def test_a_fault_that_nobody_can_commit_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_IREE_FAULT", text)
    with pytest.raises(OptionError, match=f"stage:kind:op.*{text}"):
        Settings.read()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stage"), MATRIX)
def test_a_failing_worker_sends_one_op_to_the_host_once(
    kind: str,
    stage: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counts: Counter[str],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path))
    monkeypatch.setenv("NPU_IREE_FAULT", fault(stage, kind))
    assert is_right("mixed", **LIMITS)
    assert (counts["host_ops"], counts["healed_ops"]) == (1, 1)
    assert counts["graphs"] == 1
    lines, first = inspect.getsourcelines(cases._mixed)
    number = first + next(i for i, line in enumerate(lines) if "tanh" in line)
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "lowering.heal"]
    assert OP in warning
    assert f"stage {stage}" in warning
    assert f"{cases.__file__}:{number} in _mixed" in warning
    assert capfd.readouterr() == ("", "")
    counts.clear()
    caplog.clear()
    assert is_right("mixed", **LIMITS)  # the fault would be committed again
    assert counts["denials"] == counts["host_ops"] == 1
    assert not {"compiles", "healed_ops", "cache_misses"} & counts.keys()
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.sweep
def test_processes_that_fail_at_once_end_well_and_the_next_does_not_ask(tmp_path: Path) -> None:
    cache = {"NPU_IREE_CACHE": str(tmp_path)}
    faulty = {"NPU_IREE_FAULT": fault("torch-to-linalg", "segv"), **cache}
    processes = start_together([("cases", "mixed")] * 2, **faulty)
    release(processes)
    for process in processes:
        (answer,) = finish(process)
        assert answer["right"]
        assert answer["counts"]["host_ops"] == 1
    assert len(DenialRecord(tmp_path / "denials.json").read()) == 1
    again = run("cases", "mixed", **cache)
    assert again["right"]
    assert (again["counts"]["denials"], again["counts"]["host_ops"]) == (1, 1)
    assert not {"compiles", "healed_ops", "cache_misses"} & again["counts"].keys()
    assert (again["started"], again["compilers"]) == (0, [])
    (warning,) = again["warnings"]
    assert "has refused ops before" in warning
    assert OP in warning


def test_fallback_error_raises_how_the_stage_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_IREE_FAULT", fault("linalg-to-flow", "abort"))
    with pytest.raises(BackendCompilerFailed) as raised:
        is_right("mixed", fallback="error")
    inner = raised.value.inner_exception
    assert isinstance(inner, StageError)
    assert inner.stage == "linalg-to-flow"
    assert "SIGABRT" in inner.diagnostics


@pytest.mark.slow
def test_a_fault_that_is_gone_leaves_the_op_on_the_device(
    monkeypatch: pytest.MonkeyPatch, counts: Counter[str]
) -> None:
    monkeypatch.setenv("NPU_IREE_FAULT", fault("linalg-to-flow", "error"))
    assert is_right("mixed")
    assert counts["healed_ops"] == 1
    monkeypatch.delenv("NPU_IREE_FAULT")
    counts.clear()
    assert is_right("mixed")  # without a cache there is no record
    assert (counts["healed_ops"], counts["host_ops"]) == (0, 0)


def test_an_op_whose_compiler_was_killed_is_asked_again_by_the_next_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counts: Counter[str]
) -> None:
    monkeypatch.setattr(service_module, "_KILLS", 1)
    monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path))
    monkeypatch.setenv("NPU_IREE_FAULT", fault("torch-to-linalg", "kill"))
    torch.compile(torch.tanh, backend="npu_iree")(torch.ones(3))
    assert counts["healed_ops"] == 1
    assert not (tmp_path / "denials.json").exists()


def test_flags_that_are_taken_as_the_compiler_was_killed_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compile_function: Callable[..., Any]
) -> None:
    (region,) = compile_function(torch.tanh, torch.ones(3)).plan.regions.values()
    builder = toolchain.compiler_for(Options()).builder
    builder = replace(builder, cache=ArtifactCache(tmp_path))
    killed, product = list[str](), pipeline._product

    def killed_once(stage: Any, *args: Any) -> Any:
        if stage.name == "flow-to-vmfb" and not killed:
            killed.append(stage.name)
            raise StageError(stage.name, "the compiler died of SIGKILL", was_killed=True)
        return product(stage, *args)

    monkeypatch.setattr(pipeline, "_product", killed_once)
    program = Program.of(region)
    flags = builder.target.flag_sets_for(program.traits)
    assert builder.program(program).flags == flags[1]
    assert builder.program(program).flags == flags[0]
    assert len([*builder.cache.entries()]) == 1


def test_where_the_compiler_cannot_write_no_other_flags_are_tried(
    monkeypatch: pytest.MonkeyPatch, compile_function: Callable[..., Any]
) -> None:
    (region,) = compile_function(torch.tanh, torch.ones(3)).plan.regions.values()
    tried, product = list[str](), pipeline._product

    def fails_to_link(stage: Any, *args: Any) -> Any:
        if stage.name != "flow-to-vmfb":
            return product(stage, *args)
        tried.append(stage.name)
        raise StageError(stage.name, "the compiler ended with code 1 (No space left on device)")

    monkeypatch.setattr(pipeline, "_product", fails_to_link)
    error = toolchain.compiler_for(Options()).builder.attempt(region, None)
    assert error is not None
    assert error.is_passing
    assert len(tried) == 1


def test_what_was_refused_is_asked_again_under_another_ulimit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builder = toolchain.compiler_for(Options()).builder
    before = builder.limits
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 30, 1 << 30))
    assert builder.limits != before


def test_where_everything_is_refused_no_op_is_blamed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counts: Counter[str]
) -> None:
    monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path))
    with recorded_plans() as plans:
        assert is_right("mixed", compile_time_limit_s=0.001)
    failed = [op.reason for plan in plans for op in plan.host_ops if op.kind == "failed"]
    assert failed
    assert all("refuses even the smallest program (stage " in reason for reason in failed)
    assert counts["regions"] == counts["healed_ops"] == 0
    counts.clear()
    assert is_right("mixed")
    assert (counts["denials"], counts["host_ops"]) == (0, 0)


def test_a_worker_runs_the_code_of_the_process_that_asks(tmp_path: Path) -> None:
    """Wherever that has it from: the key of what it makes names this code."""
    shutil.copytree(Path(service_module.__file__).parent, tmp_path / "lowering")
    marked = tmp_path / "lowering" / "worker.py"
    text = marked.read_text().replace("die_with_parent()\n", "raise SystemExit(77)\n", 1)
    marked.write_text(text)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from lowering.service import CompileService\n"
        "worker = CompileService(1)._starter.start()\n"
        "print(worker._process.wait())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "77", done.stderr


@pytest.fixture
def service() -> Iterator[CompileService]:
    service = CompileService(size=1)
    yield service
    service.close()


def lower(service: CompileService, fault: str | None = None, **limits: Any) -> bytes:
    return service.run("torch-to-linalg", RELU, CompileOptions(), Limits(**limits), fault)


def frame(head: dict[str, Any]) -> bytes:
    data = json.dumps(head).encode()
    return _LENGTHS.pack(len(data), 0) + data


def worker_pids() -> set[int]:
    """Give the workers of this process."""
    listed = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = {int(pid) for file in listed for pid in file.read_text().split()}
    return {p for p in pids if b"lowering.worker" in Path(f"/proc/{p}/cmdline").read_bytes()}


def test_a_worker_serves_many_requests(service: CompileService) -> None:
    assert lower(service) == lower(service)
    with pytest.raises(StageError):
        service.run("torch-to-linalg", "nonsense", CompileOptions(), Limits())
    assert b"linalg" in lower(service)
    assert service.started == 1


def test_a_worker_that_is_started_ahead_serves_the_first_request(service: CompileService) -> None:
    service.start_ahead()
    service.start_ahead()
    assert b"linalg" in lower(service)
    assert service.started == 1


def test_a_worker_comes_up_while_a_new_graph_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    service, traced = toolchain.compile_service(), list[int]()
    before, table = service.started, aot_cache.decomposition_table

    def recorded(*args: Any) -> Any:
        traced.append(service.started)
        return table(*args)

    monkeypatch.setattr(aot_cache, "decomposition_table", recorded)
    for _ in range(2):  # the second time, all is in the caches
        service.close()
        torch._dynamo.reset()
        assert is_right("f32")
    assert traced == [before + 1]
    assert worker_pids() == set()


def test_a_dead_worker_is_replaced_by_a_new_one(service: CompileService) -> None:
    for started, (kind, name) in enumerate([("abort", "ABRT"), ("segv", "SEGV")], start=1):
        with pytest.raises(StageError, match=f"died of SIG{name}"):
            lower(service, kind)
        assert service.started == started
    with pytest.raises(StageError, match="died of SIGKILL") as raised:
        lower(service, "kill")
    assert raised.value.was_killed
    assert service.started == 4, "one that is killed gets another try"
    assert b"linalg" in lower(service)
    assert service.started == 5


def test_a_worker_that_hangs_is_ended(service: CompileService) -> None:
    before = worker_pids()
    told = r"did not end within 2 s \(option compile_time_limit_s\)"
    with pytest.raises(StageError, match=told) as raised:
        lower(service, "hang", time_s=2)
    assert raised.value.timed_out
    assert worker_pids() <= before


def test_a_worker_that_reads_nothing_is_ended(service: CompileService) -> None:
    before = worker_pids()
    lower(service)
    (worker,) = worker_pids() - before
    os.kill(worker, signal.SIGSTOP)
    text = RELU + "\n" + f"// {'more than a pipe holds':1000000}"
    with pytest.raises(StageError, match="did not end within"):
        service.run("torch-to-linalg", text, CompileOptions(), Limits(time_s=2))
    assert worker_pids() <= before


def test_a_worker_that_stops_within_its_answer_or_answers_nonsense_is_ended(
    service: CompileService, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = frame({"ready": True})
    script = "import os, sys\nos.write(int(sys.argv[1]), {!r})\nwhile os.read(0, 4096): pass"

    def lower_by_one_that_answers(answer: bytes) -> None:
        command = (sys.executable, "-c", script.format(ready + answer))
        monkeypatch.setattr(own_python, "own_python", lambda _, *args: [*command, *args])
        service.close()
        lower(service, time_s=2)

    with pytest.raises(StageError, match="did not end within"):
        lower_by_one_that_answers(b"half")
    with pytest.raises(StageError, match=r"answer makes no sense: no head is of \d+ bytes"):
        lower_by_one_that_answers(b"something else than a frame")
    script = (
        "import os, sys\nos.write(int(sys.argv[1]), {!r})\nos.read(0, 1)\n"
        "sys.exit('a linker says so\\nLLVM ERROR: IO failure: No space left on device')"
    )
    with pytest.raises(StageError) as raised:
        lower_by_one_that_answers(b"")
    assert raised.value.summary.endswith("code 1 (LLVM ERROR: IO failure: No space left on device)")
    assert raised.value.lacks_space


def test_what_a_linker_says_is_told_with_the_error_that_speaks_of_it(
    service: CompileService, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = frame({"error": "failed to link (check above)\nfailed to serialize"})
    script = (
        "import os, sys\nanswers = int(sys.argv[1])\n"
        f"os.write(answers, {frame({'ready': True})!r})\nos.read(0, 1)\n"
        "print('failed to serialize\\nno such symbol', file=sys.stderr, flush=True)\n"
        f"os.write(answers, {error!r})\nwhile os.read(0, 4096): pass"
    )
    command = (sys.executable, "-c", script)
    monkeypatch.setattr(own_python, "own_python", lambda _, *args: [*command, *args])
    with pytest.raises(StageError) as raised:
        lower(service)
    told = "failed to link (check above)\nfailed to serialize\nno such symbol"
    assert raised.value.diagnostics == told


def test_what_a_worker_has_started_and_written_goes_with_it(
    service: CompileService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import os, signal, sys\nanswers = int(sys.argv[1])\n"
        f"os.write(answers, {frame({'ready': True})!r})\nos.read(0, 1)\n"
        "if not (linker := os.fork()):\n    os.close(answers)\n    signal.pause()\n"
        "open(f'{sys.argv[2]}/half.o', 'w').close()\nsys.exit(f'crashed beside {linker}')"
    )
    command = (sys.executable, "-c", script)
    monkeypatch.setattr(own_python, "own_python", lambda _, *args: [*command, *args])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(StageError, match=r"crashed beside \d+") as raised:
        lower(service)
    linker = int(raised.value.diagnostics.rpartition(" ")[2])
    try:
        wait_until(lambda: _is_dead(linker), limit_s=10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(linker, signal.SIGKILL)
    assert [*tmp_path.iterdir()] == []


def test_a_worker_that_has_used_up_its_memory_goes_on(service: CompileService) -> None:
    with pytest.raises(StageError, match=r"out of memory; it may use .*compile_memory_limit_bytes"):
        lower(service, "memory", memory_bytes=2 << 30)
    assert b"linalg" in lower(service, memory_bytes=2 << 30)
    assert service.started == 1


def test_a_worker_that_died_while_idle_is_nobodys_fault(service: CompileService) -> None:
    before = worker_pids()
    lower(service)
    (pid,) = worker_pids() - before
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: _is_dead(pid))
    assert b"linalg" in lower(service)


def _is_dead(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_a_closed_service_leaves_no_process_and_can_be_used_again(service: CompileService) -> None:
    before = worker_pids()
    lower(service)
    service.close()
    assert worker_pids() <= before
    assert b"linalg" in lower(service)


def test_a_worker_that_comes_up_while_the_service_is_closed_serves_no_cancelled_request(
    service: CompileService, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, cancelled, start_worker = worker_pids(), threading.Event(), service_module._start_worker

    def start_late() -> Any:
        worker = start_worker()
        cancelled.set()
        service.close()  # does not know this worker yet
        return worker

    monkeypatch.setattr(service_module, "_start_worker", start_late)
    with pytest.raises(CancelledError):
        service.run("torch-to-linalg", RELU, CompileOptions(), Limits(), "hang", cancelled)
    assert worker_pids() <= before


def test_a_workers_stderr_is_quoted_and_not_shown(
    service: CompileService, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StageError, match="asked to fail"):
        lower(service, "error")
    assert capfd.readouterr() == ("", "")


def test_a_folder_of_the_users_cannot_shadow_what_a_worker_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: CompileService
) -> None:
    for name in ("lowering", "json", "torch_mlir"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('this one is the user\\'s')")
    monkeypatch.chdir(tmp_path)
    assert b"linalg" in lower(service)


def test_a_worker_does_not_stay_in_the_folder_of_the_last_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: CompileService
) -> None:
    def folders() -> set[Path]:
        return {Path(f"/proc/{pid}/cwd").readlink() for pid in worker_pids()}

    monkeypatch.chdir(tmp_path)
    lower(service)
    assert tmp_path in folders()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir("gone")
    (tmp_path / "gone").rmdir()
    lower(service)
    assert tmp_path not in folders()


@pytest.mark.slow
def test_a_forked_process_has_workers_of_its_own() -> None:
    done = run("fork", NPU_IREE_CACHE="off")
    assert done["child"]["right"]
    assert done["child"]["code"] == 0, "it ends by itself"
    assert "before this process was forked" in done["child"]["refusal"]
    assert done["sum"] == 2.0 * sum(range(8))
    assert done["right"]
    assert done["restarted"] == 0, "the parent's workers live on"


@pytest.fixture
def slow_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the interpreter of a worker wait for a pipe to be opened, and say so on its stdout."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "sitecustomize.py").write_text(
        f"open({str(gate)!r}).close()\nprint('opened', flush=True)"
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    return gate


def test_the_start_of_a_worker_is_not_the_time_of_a_stage(
    service: CompileService, slow_start: Path
) -> None:
    opener = threading.Timer(3.0, lambda: slow_start.open("w").close())
    opener.start()
    started = time.monotonic()
    assert b"linalg" in lower(service, time_s=2.0)
    assert time.monotonic() - started > 2.9


def test_a_worker_that_does_not_come_up_is_not_the_programs_fault(
    service: CompileService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerStartError, match="ended with code 1"):
        lower(service)
    assert service.started == 3
    monkeypatch.setattr(sys, "executable", "/nothing")
    with pytest.raises(WorkerStartError, match="No such file"):
        lower(service)
    monkeypatch.undo()
    assert b"linalg" in lower(service)


def test_without_workers_no_op_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: CompileService
) -> None:
    monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path))
    monkeypatch.setattr(toolchain, "compile_service", lambda: service)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BackendCompilerFailed, match="no compile worker comes up"):
        is_right("mixed")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def entries(cache: Path) -> list[Path]:
    return [*(cache / "artifacts").glob("*.npua")]


@pytest.fixture
def interrupted(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a case that hangs; interrupt it once it compiles and as many entries are there."""
    cache, scratch = tmp_path / "cache", tmp_path / "scratch"
    scratch.mkdir()
    processes: list[subprocess.Popen[str]] = []

    def interrupt(case: str, hang: str, after_entries: int = 0) -> subprocess.Popen[str]:
        env = {"NPU_IREE_CACHE": str(cache), "NPU_IREE_FAULT": hang, "TMPDIR": str(scratch)}
        process = start("cases", case, **env)
        processes.append(process)
        locks, settings = cache / "locks", f"NPU_IREE_CACHE={cache}"
        wait_until(
            lambda: (
                [*locks.glob("*")]
                and len(processes_with(settings)) > 1
                and len(entries(cache)) >= after_entries
            ),
            process,
            limit_s=150,
        )
        assert len(entries(cache)) == after_entries
        process.send_signal(signal.SIGINT)
        return process

    yield interrupt
    for process in processes:
        process.kill()
        process.communicate()


def assert_nothing_is_left(process: subprocess.Popen[str], tmp_path: Path) -> None:
    _, err = process.communicate(timeout=40)
    assert "KeyboardInterrupt" in err
    assert "StageError" not in err
    cache = tmp_path / "cache"
    wait_until(lambda: not processes_with(f"NPU_IREE_CACHE={cache}"), limit_s=30)
    assert [*(cache / "locks").glob("*")] == []
    assert [*(cache / "artifacts").glob(".*")] == []
    assert [*(tmp_path / "scratch").glob("npu-iree-*")] == []
    assert not (cache / "denials.json").exists()


@pytest.mark.sweep  # the test below does the same while another region is compiled
@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_during_a_compile_leaves_nothing(
    stage: str, tmp_path: Path, interrupted: Callable[..., subprocess.Popen[str]]
) -> None:
    assert_nothing_is_left(interrupted("mixed", fault(stage, "hang")), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("op", [pytest.param("aten.exp.default", marks=pytest.mark.sweep), OP])
def test_a_region_is_compiled_while_another_one_hangs(
    op: str, tmp_path: Path, interrupted: Callable[..., subprocess.Popen[str]]
) -> None:
    hang = fault("linalg-to-flow", "hang", op)  # where another flag set could be tried
    assert_nothing_is_left(interrupted("independent", hang, after_entries=1), tmp_path)


def test_different_regions_get_workers_of_their_own() -> None:
    service = toolchain.compile_service()
    service.close()
    before = service.started
    assert is_right("independent")
    assert service.started == before + 2


def test_identical_layers_are_compiled_once(counts: Counter[str]) -> None:
    count = 4

    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            x = torch.tanh(x) * 2
            x = x - torch.median(x)
        return x

    x = torch.randn(4, 8)
    close = torch.testing.assert_close
    close(torch.compile(layers, backend="npu_iree")(x), layers(x), rtol=1e-4, atol=1e-5)
    assert counts["regions"] == count + 1
    assert counts["compiles"] == 3  # the first, those between two medians, and the last


def chain(length: int) -> list[fx.Node]:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(length):
        value = graph.call_function(torch.ops.aten.relu.default, (value,))
    return [node for node in graph.nodes if node.op == "call_function"]


def diagnosed(
    nodes: Sequence[fx.Node], fails: Callable[[set[fx.Node]], bool]
) -> tuple[Diagnosis, int]:
    """Bisect with a compiler that refuses what `fails`; give the number of its compiles, too."""
    tried: list[Sequence[fx.Node]] = []

    def attempt(part: Sequence[fx.Node]) -> StageError | None:
        tried.append(part)
        return StageError("stage", "no") if fails(set(part)) else None

    return diagnose(nodes, StageError("stage", "no"), attempt), len(tried)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 31, 100])
def test_one_bad_op_is_found_in_few_compiles(length: int) -> None:
    nodes = chain(length)
    for bad in nodes:
        found, compiles = diagnosed(nodes, lambda part, bad=bad: bad in part)
        assert (list(found.blamed), found.parts) == ([bad], [])
        assert compiles <= 2 * math.log2(length) + 2


def test_two_bad_ops_are_found() -> None:
    nodes = chain(9)
    for pair in combinations(nodes, 2):
        found, _ = diagnosed(nodes, lambda part, pair=pair: not part.isdisjoint(pair))
        assert (set(found.blamed), found.parts) == (set(pair), [])


def test_ops_alike_cost_a_compile_each_and_no_bisection() -> None:
    nodes = chain(64)
    for node in nodes[:48:3]:
        node.target = torch.ops.aten.erf.default
    bad = nodes[:48:3]
    found, compiles = diagnosed(nodes, lambda part: not part.isdisjoint(bad))
    assert (list(found.blamed), found.parts) == (bad, [])
    assert compiles <= 2 * math.log2(len(nodes)) + len(bad)


def test_two_ops_that_fail_together_are_kept_apart() -> None:
    nodes = chain(9)
    for pair in combinations(nodes, 2):
        found, compiles = diagnosed(nodes, lambda part, pair=pair: part.issuperset(pair))
        assert found.blamed == {}
        assert [n for part in found.parts for n in part] == nodes, "each once, in order"
        assert not any(set(part).issuperset(pair) for part in found.parts)
        assert compiles <= 2 * math.log2(len(nodes)) + 2


def test_what_takes_a_result_apart_stays_with_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    both = graph.call_function(torch.ops.aten.topk.default, (x, 1))
    other = graph.call_function(torch.ops.aten.relu.default, (x,))
    first = graph.call_function(operator.getitem, (both, 0))
    nodes = [both, other, first]
    found, _ = diagnosed(nodes, lambda part: both in part or first in part)
    assert list(found.blamed) == [both, first]
    found, _ = diagnosed(nodes, lambda part: part.issuperset(nodes))
    assert (
        _split(nodes, [len(part) for part in found.parts]) == found.parts == [nodes[::2], [other]]
    )


def test_graphs_share_the_workers_of_a_process(counts: Counter[str]) -> None:
    assert is_right("f32")
    started = toolchain.compile_service().started
    assert is_right("plus-1")
    assert (counts["compiles"], toolchain.compile_service().started) == (2, started)

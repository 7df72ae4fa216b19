"""Tuning: candidates are measured on the device, checked against the default, and remembered."""

from __future__ import annotations

import select
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import npu_iree
from lowering import own_python
from lowering.build import Builder
from lowering.cache import ArtifactCache, Entry
from lowering.errors import CancelledError, MeasureError, StageError
from lowering.pipeline import Toolchain
from lowering.program import Program
from lowering.service import Fault
from lowering.target import Candidate, CompileTarget
from lowering.tuning import DEFAULT, Trial, Tuning, TuningRecord, _winner
from npu_iree import timing, tuning
from npu_iree.options import Options
from npu_iree.runner import Runner
from npu_iree.targets import NPU_LOCAL, Target
from npu_iree.toolchain import compiler_for
from npu_iree.tuning import DeviceMeasure
from programs.launch import run

UNTILED = NPU_LOCAL.compile.flag_sets[1]
PLAIN = NPU_LOCAL.compile.flag_sets[2]
DEMOTE = "iree-global-opt-demote-contraction-inputs{type=bf16 operation=matmul}"
ROUGH = (*UNTILED, f"--iree-preprocessing-pass-pipeline=builtin.module(util.func({DEMOTE}))")
FAILS = (*UNTILED, "--iree-no-such-flag")


def vendor(**candidates: tuple[str, ...]) -> Target:
    """A target with candidates of its own; the default is compiled without flags."""
    listed = tuple(Candidate(name=n, flags=f, is_quick=True) for n, f in candidates.items())
    compile_ = CompileTarget(name="vendor", flag_sets=(PLAIN,), candidates=listed)
    return replace(NPU_LOCAL, compile=compile_)


@pytest.fixture
def tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compile_function: Callable[..., Runner]
) -> Callable[..., tuple[Runner, TuningRecord]]:
    """Tune a function for a target; return its runner and the record that is in the cache."""

    def tune(target: Target, function: Any, *args: Any) -> tuple[Runner, TuningRecord]:
        monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path))
        table = import_module("npu_iree.targets")  # `npu_iree.targets` is the function
        monkeypatch.setattr(table, "targets", lambda: {target.name: target})
        runner = compile_function(function, *args, target=target.name, tune="quick")
        (row,) = [e.tuning for _, e in ArtifactCache(tmp_path).entries() if e.tuning is not None]
        return runner, TuningRecord.from_json(row)

    return tune


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ y)


def by_name(record: TuningRecord) -> dict[str, Trial]:
    return {trial.name: trial for trial in record.trials}


def test_the_record_tells_what_was_measured_and_taken_and_why_other_candidates_were_not(
    tuned: Callable[..., tuple[Runner, TuningRecord]], counts: Counter[str]
) -> None:
    x, y = torch.randn(128, 256), torch.randn(256, 128)
    runner, record = tuned(vendor(untiled=UNTILED, rough=ROUGH, fails=FAILS), product, x, y)
    torch.testing.assert_close(runner(x, y)[0], product(x, y), rtol=1e-4, atol=1e-4)
    trials = by_name(record)
    assert list(trials) == [DEFAULT, "untiled", "rough", "fails"]
    assert (trials[DEFAULT].flags, trials["untiled"].flags) == (PLAIN, UNTILED)
    for trial in (trials[DEFAULT], trials["untiled"]):
        assert trial.problem == ""
        assert min(trial.ms, trial.default_ms, trial.ratio) > 0
        assert trial.difference < 1e-5
    assert trials["untiled"].compile_ms > 0
    assert "away from the default's" in trials["rough"].problem
    assert trials["rough"].difference > 1e-4
    assert "option not found: iree-no-such-flag" in trials["fails"].problem
    assert record.winner in (DEFAULT, "untiled")
    assert record.level == "quick"
    assert record.cost_ms > trials["untiled"].compile_ms
    (executable,) = runner.executables.values()
    assert executable.artifact.flags == trials[record.winner].flags
    assert counts["tuned_regions"] == 1


def test_a_compiler_that_crashes_costs_a_candidate_only(
    tmp_path: Path, compile_function: Callable[..., Runner]
) -> None:
    (region,) = compile_function(torch.tanh, torch.randn(8)).plan.regions.values()
    program, target = Program.of(region), vendor(untiled=UNTILED).compile
    cache = ArtifactCache(tmp_path)
    plain = replace(compiler_for(Options()).builder, target=target, cache=cache)
    default = plain.program(program)
    fault = Fault("flow-to-vmfb", "abort", "aten.tanh.default")
    toolchain = replace(plain.toolchain, fault=fault)
    tuning = Tuning(level="quick", measure=DeviceMeasure(NPU_LOCAL))
    entry = replace(plain, toolchain=toolchain, tuning=tuning).program(program)
    trials = by_name(TuningRecord.from_json(entry.tuning or {}))
    assert "SIGABRT" in trials["untiled"].problem
    assert (trials[DEFAULT].problem, entry.vmfb) == ("", default.vmfb)


class _Hangs:
    """A compile service in which all hangs until it is closed; Ctrl-C comes meanwhile."""

    size = 2

    def __init__(self) -> None:
        self.is_closed = threading.Event()
        self.all_hang = threading.Barrier(self.size, action=self._interrupt)

    @staticmethod
    def _interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def run(self, *args: Any) -> bytes:
        self.all_hang.wait()
        if not self.is_closed.wait(20):
            raise StageError("torch-to-linalg", "it was not closed")
        raise CancelledError

    def close(self) -> None:
        self.is_closed.set()


def test_ctrl_c_ends_the_candidates_that_are_compiled() -> None:
    hangs, before = _Hangs(), signal.signal(signal.SIGINT, signal.default_int_handler)
    tuning = Tuning(level="quick", measure=lambda *_: ({}, 0.0))
    parts = dict.fromkeys(("parameters", "given", "rebind", "kernels"), "{}")
    program, default = Mock(Program, traits=frozenset()), Entry(parts, (), b"", "")
    target, toolchain = vendor(untiled=UNTILED, rough=ROUGH).compile, Toolchain(service=hangs)
    try:
        with pytest.raises(KeyboardInterrupt):
            tuning.tuned(program, default, target, toolchain)
    finally:
        signal.signal(signal.SIGINT, before)
    assert hangs.is_closed.is_set()


@pytest.mark.parametrize("was_killed", [True, False])
def test_a_candidate_whose_compiler_was_killed_is_tried_again_by_the_next_process(
    was_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = StageError("flow-to-vmfb", "the compiler died of SIGKILL", was_killed=was_killed)
    monkeypatch.setattr("lowering.tuning._compiled", lambda *_: [(error, 1.0)])
    tuning = Tuning(level="quick", measure=lambda *_: ({}, 0.0))
    program = Mock(Program, traits=frozenset())
    default, target = Entry({}, (), b"", ""), vendor(untiled=UNTILED).compile
    made = tuning.tuned(program, default, target, Toolchain())
    assert "SIGKILL" in by_name(TuningRecord.from_json(made.tuning or {}))["untiled"].problem
    assert made.is_lasting is not was_killed


@pytest.mark.slow
def test_a_module_that_ends_the_process_costs_itself_only(
    compile_function: Callable[..., Runner],
) -> None:
    """Its code reads far outside of its memory, in the process that measures."""

    @torch.library.custom_op("tuning::far", mutates_args=())
    def far(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @far.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    npu_iree.register_kernel(
        "tuning::far",
        """
        func.func @far(%x: tensor<?xi64>) -> tensor<?xi64> {
          %zero = arith.constant 0 : index
          %away = arith.constant 1000000000000 : index
          %n = tensor.dim %x, %zero : tensor<?xi64>
          %empty = tensor.empty(%n) : tensor<?xi64>
          %0 = linalg.generic {
              indexing_maps = [affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]
            } outs(%empty : tensor<?xi64>) {
            ^bb0(%old: i64):
              %i = linalg.index 0 : index
              %far = arith.addi %i, %away : index
              %value = tensor.extract %x[%far] : tensor<?xi64>
              linalg.yield %value : i64
          } -> tensor<?xi64>
          return %0 : tensor<?xi64>
        }""",
    )
    x = torch.arange(64)
    good = compile_function(lambda a: a + a, x)
    bad = compile_function(lambda a: far(a), x)
    (region,) = good.plan.regions.values()
    modules = {
        name: Entry({}, (), next(iter(runner.executables.values())).artifact.vmfb, "")
        for name, runner in {DEFAULT: good, "bad": bad, "same": good}.items()
    }
    trials, _ = DeviceMeasure(NPU_LOCAL)(Program.of(region), modules, "quick")
    assert trials["bad"].problem == "running it ends the process"
    assert (trials["same"].problem, trials["same"].difference) == ("", 0.0)


def test_a_default_that_hangs_is_given_up_and_what_does_not_start_tells_why(
    compile_function: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(8)
    runner = compile_function(torch.relu, x)
    (region,), (executable,) = runner.plan.regions.values(), runner.executables.values()
    entry = Entry({}, (), executable.artifact.vmfb, "")
    measure = DeviceMeasure(NPU_LOCAL, silence_s=0.01)  # less than a process takes to start
    with pytest.raises(MeasureError, match="does not end within"):
        measure(Program.of(region), {DEFAULT: entry, "other": entry}, "quick")
    ends = (sys.executable, "-c", "raise SystemExit('one line\\nand why\\n')")
    monkeypatch.setattr(own_python, "own_python", lambda *_: [*ends])
    with pytest.raises(MeasureError, match=r"does not start \(and why\)"):
        DeviceMeasure(NPU_LOCAL)(Program.of(region), {DEFAULT: entry}, "quick")


class _OnePiece:
    """Waits for the first piece as long as it takes; then there is silence at once."""

    def __init__(self, poll: Callable[[], Any] = select.poll) -> None:
        self._poll = poll()
        self.register = self._poll.register
        self._came = False

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        came, self._came = self._came, True
        return [] if came else self._poll.poll()


def test_what_came_in_one_piece_is_read_before_the_silence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    says = (
        "import os, signal, sys\n"
        "print('hello', flush=True)\n"
        'os.write(int(sys.argv[1]), b\'{"a": 1}\\n{"b": 2}\\n{"c"\')\n'
        "signal.pause()\n"
    )
    command = (sys.executable, "-c", says)
    monkeypatch.setattr(own_python, "own_python", lambda _, *args: [*command, *args])
    monkeypatch.setattr(tuning.select, "poll", _OnePiece)
    assert list(tuning._answers(tmp_path, [], 0, silence_s=60)) == [{"a": 1}, {"b": 2}, {}]


def test_where_nothing_can_be_written_the_default_is_taken_and_not_kept(
    compile_function: Callable[..., Runner],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (region,) = compile_function(torch.relu, torch.randn(8)).plan.regions.values()
    default, nothing_else = Entry({}, (), b"", ""), vendor().compile
    monkeypatch.setattr(tuning.tempfile, "tempdir", "/nowhere")
    made = Tuning(level="quick", measure=DeviceMeasure(NPU_LOCAL)).tuned(
        Program.of(region), default, nothing_else, Toolchain()
    )
    assert made == replace(default, is_lasting=False)
    assert "the default settings are taken" in caplog.text


def _in_this_process(
    folder: Path, names: Sequence[str], budget_s: float, silence_s: float
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    timing.run(folder, names, budget_s, lambda **row: rows.append(row))
    return rows


def test_where_there_is_no_device_the_default_is_taken_and_not_kept(
    compile_function: Callable[..., Runner],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (region,) = compile_function(torch.relu, torch.randn(8)).plan.regions.values()
    absent = replace(vendor().compile, name="absent")
    default, target = Entry({}, (), b"", ""), replace(vendor(), compile=absent, driver="nosuch")
    monkeypatch.setattr(tuning, "_answers", _in_this_process)
    made = Tuning(level="quick", measure=DeviceMeasure(target)).tuned(
        Program.of(region), default, target.compile, Toolchain()
    )
    assert made == replace(default, is_lasting=False)
    assert "IREE has no driver 'nosuch'" in caplog.text


def test_a_default_that_ends_the_process_later_is_no_fault_of_a_candidate(
    compile_function: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process is ended by a candidate; the next one's device has gone."""
    (region,) = compile_function(torch.relu, torch.randn(8)).plan.regions.values()
    modules = dict.fromkeys((DEFAULT, "bad", "other"), Entry({}, (), b"", ""))
    default = {"name": DEFAULT, "ratio": 1.0, "worst_ratio": 1.0}
    said = [[{"begin": DEFAULT}, default, {"begin": "bad"}], [{"failed": "it has gone"}]]
    monkeypatch.setattr(tuning, "_answers", lambda *_: said.pop(0))
    with pytest.raises(MeasureError, match="it has gone"):
        DeviceMeasure(NPU_LOCAL)(Program.of(region), modules, "quick")


def test_results_that_tell_nothing_choose_nothing(compile_function: Callable[..., Runner]) -> None:
    def undefined(x: torch.Tensor) -> torch.Tensor:
        return torch.log(-torch.abs(x) - 1)

    x = torch.randn(8)
    runner = compile_function(undefined, x)
    (region,), (executable,) = runner.plan.regions.values(), runner.executables.values()
    entry = Entry({}, (), executable.artifact.vmfb, "")
    modules = {DEFAULT: entry, "other": entry}
    trials, _ = DeviceMeasure(NPU_LOCAL)(Program.of(region), modules, "quick")
    assert all("no finite results" in trial.problem for trial in trials.values())


@pytest.mark.sweep
def test_a_second_process_does_not_tune_again(tmp_path: Path) -> None:
    options = '--options={"tune": "quick"}'
    first = run("cases", "f32", options, NPU_IREE_CACHE=str(tmp_path))
    assert first["right"]
    assert first["counts"]["tuned_regions"] == 1
    second = run("cases", "f32", options, NPU_IREE_CACHE=str(tmp_path))
    assert second["right"]
    assert second["counts"]["cache_hits"] == 1
    assert not {"tuned_regions", "compiles"} & second["counts"].keys()
    plain = run("cases", "f32", NPU_IREE_CACHE=str(tmp_path))
    assert "compiles" not in plain["counts"], "the default was compiled on the way, and kept"


@pytest.mark.parametrize(
    ("ratio", "worst", "problem", "wins"),
    [(0.5, 0.6, "", True), (0.97, 0.99, "", False), (0.5, 1.1, "", False), (0.5, 0.6, "no", False)],
)
def test_only_more_than_noise_wins(ratio: float, worst: float, problem: str, wins: bool) -> None:
    trial = Trial(name="x", flags=(), ratio=ratio, worst_ratio=worst, problem=problem)
    assert trial.wins(0.05) is wins


def test_the_default_is_taken_where_all_others_have_a_problem() -> None:
    fast = Trial(name="fast", flags=(), ratio=0.5, worst_ratio=0.5)
    default = replace(fast, name=DEFAULT, ratio=1.0, worst_ratio=1.0)
    rough = replace(fast, name="rough", problem="away from the default's")
    fails = Trial(name="fails", flags=(), problem="option not found")
    assert _winner([default, rough, fails], noise=0.02) == DEFAULT
    assert _winner([default, rough, fails, fast], noise=0.02) == "fast"


def test_the_fastest_candidate_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compile_function: Callable[..., Runner]
) -> None:
    """Whatever is measured decides, and what it cost is won back after so many calls."""
    target = vendor(slow=UNTILED, fast=(*UNTILED, "--iree-opt-data-tiling"))

    def measure(
        program: Program, modules: Mapping[str, Entry], level: str
    ) -> tuple[dict[str, Trial], float]:
        ratios = {DEFAULT: 1.0, "slow": 1.5, "fast": 0.5}
        return {
            name: Trial(
                name=name,
                flags=(),
                ms=r * 7.9,
                default_ms=8.0,
                ratio=r,
                worst_ratio=r,
                difference=0,
            )
            for name, r in ratios.items()
        }, 0.02

    x = torch.randn(8)
    (region,) = compile_function(torch.relu, x).plan.regions.values()
    builder: Builder = compiler_for(Options()).builder
    tuning = Tuning(level="quick", measure=measure)
    builder = replace(builder, target=target.compile, tuning=tuning, cache=ArtifactCache(tmp_path))
    entry = builder.program(Program.of(region))
    record = TuningRecord.from_json(entry.tuning or {})
    assert (record.winner, entry.flags) == ("fast", target.compile.candidates[1].flags)
    assert record.pays_back_calls == round(record.cost_ms / (8.0 - 0.5 * 7.9))
    assert replace(record, winner=DEFAULT).pays_back_calls is None
    again = builder.program(Program.of(region))
    assert (again.vmfb, TuningRecord.from_json(again.tuning or {})) == (entry.vmfb, record)
    assert builder.counts["tuned_regions"] == 1

"""The conformance suite: right ops are said to be right, and each way to fail is told."""

from __future__ import annotations

import functools
import json
import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
import torch

from command import Ended, invoke
from lowering.errors import HostOp, StageError
from npu_iree import toolchain
from npu_iree.conformance import cases, judge, report
from npu_iree.conformance.cases import Case
from npu_iree.conformance.observe import COMPARED_BY, _plain
from npu_iree.conformance.pool import Died, run_all
from npu_iree.conformance.run import _died, read_journal, run_cases
from npu_iree.conformance.verdict import Verdict
from npu_iree.errors import OptionError
from programs.pool_tasks import fail, make_ready

COMMAND = (str(Path(sys.executable).parent / "npu-iree"), "conformance")
Command = Callable[..., Ended]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`npu-iree conformance`, in this process."""
    return functools.partial(invoke, monkeypatch, capsys, "conformance")


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(args, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.usefixtures("own_pool")
def test_right_operators_pass_and_say_where_they_ran(tmp_path: Path, command: Command) -> None:
    files = {name: tmp_path / name for name in ("journal", "verdicts", "junit")}
    done = command(
        "ops", "--filter", "^(mm|median)$", "--samples", 1, "--target", "npu-virtual", "-j", 1,
        "--journal", files["journal"], "--json", files["verdicts"], "--junit", files["junit"],
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    found = {v.key: v.outcome for v in read_journal(files["verdicts"]).values()}
    assert found == {"mm[f32]": "device", "median[f32]": "host"}
    assert read_journal(files["journal"]) == read_journal(files["verdicts"])
    suite = ElementTree.parse(files["junit"]).getroot()
    assert len(suite.findall(".//testcase")) == len(found)


@pytest.mark.sweep
def test_a_stopped_run_goes_on_and_a_wrong_operator_fails_it(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    command = (*COMMAND, "ops", "--samples", "1", "--journal", str(journal))
    assert run(*command, "--filter", "^add$").returncode == 0
    planted = {"key": "add[f32]", "outcome": "wrong", "detail": "planted"}
    with journal.open("a") as lines:
        lines.write(json.dumps(planted) + "\n" + '{"key": "mm[f3')
    done = run(*command, "--filter", "^(add|mm)$")
    assert done.returncode == 1
    assert "wrong: add[f32]: planted" in done.stdout
    assert read_journal(journal)["mm[f32]"].outcome == "device"


def nothing(case: Any, progress: Any) -> Verdict:
    return Verdict(case.key, "device")


def test_a_journal_is_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = tmp_path / "journal"
    judged: list[Case] = []

    def run_here(function: Any, tasks: list[Case], **_: Any) -> list[tuple[Case, Verdict]]:
        judged.extend(tasks)
        return [(task, function(task, print)) for task in tasks]

    monkeypatch.setattr("npu_iree.conformance.run.run_all", run_here)
    case = Case("mm", 0, "f32", samples=1, backward=False)

    def go_on(target: str) -> list[Verdict]:
        judged_as = {"target": target}
        found = run_cases([case], nothing, jobs=1, limit_s=60, journal=journal, judged_as=judged_as)
        return list(found)

    assert go_on("npu-local") == go_on("npu-local") == [Verdict("mm[f32]", "device")]
    assert judged == [case]
    with pytest.raises(OptionError, match="target npu-local, not cuda"):
        go_on("cuda")
    journal.write_text("a,b\n")
    with pytest.raises(OptionError, match="is no journal"):
        go_on("npu-local")
    assert journal.read_text() == "a,b\n"


def test_a_dtype_that_is_none_is_one_clear_line(command: Command) -> None:
    done = command("ops", "--dtype", "f31")
    assert done.code == 2
    assert "no dtype f31; there are f16" in done.err


def plant(monkeypatch: pytest.MonkeyPatch, op: Callable[..., Any], *samples: Any) -> None:
    """Make a function the only entry of PyTorch's database."""
    info = SimpleNamespace(op=op, sample_inputs=lambda *_, **__: samples)
    monkeypatch.setattr(judge, "database", lambda: [info])


def sample_of(*inputs: Any) -> Any:
    return SimpleNamespace(input=inputs[0], args=inputs[1:], kwargs={})


def outcome(monkeypatch: pytest.MonkeyPatch, op: Callable[..., Any], *inputs: Any) -> Verdict:
    """Judge a function as if it were an entry of PyTorch's database."""
    plant(monkeypatch, op, sample_of(*inputs))
    return judge.judge(Case("planted", 0, "f32", 1, True), "npu-local", lambda text: None)


def test_another_number_than_eagers_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def lie(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.compiler.is_compiling() else x

    verdict = outcome(monkeypatch, lie, torch.ones(3))
    assert verdict.outcome == "wrong"
    assert "result 0 of [3]" in verdict.detail


def test_another_gradient_than_eagers_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def lie(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.compiler.is_compiling() else x * 2 + (x - x.detach())

    verdict = outcome(monkeypatch, lie, torch.ones(3, requires_grad=True))
    assert verdict.outcome == "wrong"
    assert "gradient 0" in verdict.detail


def test_other_arguments_or_numbers_than_eagers_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def lie_in_place(x: torch.Tensor) -> torch.Tensor:
        return (x.add_(1) if torch.compiler.is_compiling() else x) * 0

    def lie_in_a_number(x: torch.Tensor) -> bool:
        return torch.compiler.is_compiling() != bool(x.shape)

    verdict = outcome(monkeypatch, lie_in_place, torch.ones(3))
    assert verdict.outcome == "wrong"
    assert "argument 0 after the call" in verdict.detail
    assert outcome(monkeypatch, lie_in_a_number, torch.ones(3)).outcome == "wrong"


def test_what_is_wrong_of_all_samples_together_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lie(calls: Any) -> list[Any]:
        return [value + (len(calls) == 2) for value, _, _ in calls]

    plant(monkeypatch, torch.clone, sample_of(torch.ones(3)), sample_of(torch.zeros(2)))
    monkeypatch.setattr(judge, "compiled_anew", lambda function, target: lie)
    verdict = judge.judge(Case("planted", 0, "f32", 2, False), "npu-local", lambda text: None)
    assert verdict.outcome == "wrong"
    assert verdict.detail.startswith("only all samples as one graph: result 0")


def test_a_host_that_was_chosen_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = outcome(monkeypatch, torch.clone, torch.ones(3))
    assert verdict.outcome == "idle"
    assert "aten.clone.default: moves data only" in verdict.detail


def test_eagers_rounding_excuses_no_number_elsewhere() -> None:
    exact = torch.tensor([1e5, 3.0, 5.0])
    expected = torch.tensor([math.inf, 3.0, 5.0], dtype=torch.float16)
    assert judge.rounds_as_eager(expected, expected, exact)
    assert not judge.rounds_as_eager(expected * torch.tensor([1, -1e4, 1]).half(), expected, exact)
    better = torch.tensor([3.0, 5.0], dtype=torch.float16)
    assert judge.rounds_as_eager(better, better * math.nan, exact[1:])
    assert not judge.rounds_as_eager(better * math.nan, better, exact[1:])


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_large_number_excuses_no_small_one_of_an_elementwise_operator(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lie(calls: Any) -> list[Any]:
        results = [torch.exp(value) for value, _, _ in calls]
        return [torch.where(y < y.max() * 1e-3, -0.1, y) for y in results]

    found = {case.name: case for case in cases.cases([dtype], samples=1)}
    assert not cases.is_elementwise(found["sum"])
    monkeypatch.setattr(judge, "compiled_anew", lambda function, target: lie)
    verdict = judge.judge(found["exp"], "npu-local", lambda text: None)
    assert verdict.outcome == "wrong"


def test_indices_are_compared_as_far_as_an_order_is_promised() -> None:
    x, sort = torch.tensor([2.0, 1.0, 1.0]), COMPARED_BY["sort"]

    def told(*indices: int, **kwargs: Any) -> dict[str, str]:
        results = (
            sort(x, (), kwargs, (x.sort().values, torch.tensor(i))) for i in (indices, right)
        )
        one, other = ({str(i): _plain(r) for i, r in enumerate(result)} for result in results)
        return judge.differences(one, other, 1)

    right = (1, 2, 0)
    assert not told(2, 1, 0)
    assert told(1, 1, 0)
    assert told(2, 1, 0, stable=True)


def test_an_error_of_ours_is_one_and_an_error_of_eagers_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def eagers(x: torch.Tensor) -> torch.Tensor:
        return x.view(7)

    assert outcome(monkeypatch, eagers, torch.ones(3)).outcome == "skipped"
    monkeypatch.setattr(toolchain, "load_capabilities", lambda name: 1 / 0)
    found = outcome(monkeypatch, torch.relu, torch.ones(3))
    assert (found.outcome, found.detail) == ("error", "ZeroDivisionError: division by zero")


@pytest.mark.usefixtures("own_pool")
def test_a_crash_and_a_hang_end_one_case_only() -> None:
    tasks = ["fine", "abort", "hang", "raise", "fine too"]
    answers = dict(run_all(fail, tasks, workers=2, limit_s=5, make_ready=make_ready))
    assert answers["fine"] == "fine as asked"
    assert answers["fine too"] == "fine too as asked"
    assert answers["abort"] == Died("abort", "SIGABRT")
    assert answers["hang"] == Died("hang", "no answer in 5 s", "hang", so_far=4)
    assert answers["raise"] == Died("raise", "ValueError: no reason", "error")


@pytest.mark.usefixtures("own_pool")
def test_a_worker_that_dies_behind_its_answer_fails_that_case_and_no_other() -> None:
    answers = {}
    for task, answer in run_all(fail, ["pid", "fine"], workers=1, limit_s=5, make_ready=make_ready):
        if task not in answers and isinstance(answer, str) and answer.isdecimal():
            os.kill(int(answer), signal.SIGKILL)
            assert _has_ended(int(answer), within_s=20)
        answers[task] = answer
    assert answers == {"pid": Died("after its answer", "SIGKILL"), "fine": "fine as asked"}


_ENDS_BESIDE_A_HANG = """
import os, signal, sys
from pathlib import Path
from npu_iree.conformance.pool import run_all

def hang(parent, progress):
    Path(sys.argv[1]).write_text(str(os.getpid()))
    os.kill(parent, signal.SIGKILL)
    signal.pause()

if __name__ == "__main__":
    list(run_all(hang, [os.getpid()], workers=1, limit_s=60))
"""


def test_no_worker_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    script, worker = tmp_path / "run.py", tmp_path / "worker"
    script.write_text(_ENDS_BESIDE_A_HANG)
    assert run(sys.executable, str(script), str(worker)).returncode == -signal.SIGKILL
    assert _has_ended(int(worker.read_text()), within_s=20)


def _has_ended(pid: int, within_s: float) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], within_s)[0])
    finally:
        os.close(process)


def test_what_was_found_before_a_hang_is_the_verdict() -> None:
    verdict = Verdict("mm[f32]", "wrong")
    case = Case("mm", 0, "f32", samples=1, backward=False)
    assert _died(case, Died("a cut", "no answer in 3 s", "hang", verdict)) == verdict
    assert _died(case, Died("a cut", "no answer in 3 s", "hang")).outcome == "hang"


@pytest.mark.parametrize(
    ("before", "after", "fails"),
    [
        ("device", "host", True),
        ("host", "device", False),
        ("device", "idle", False),
        ("idle", "device", False),
        ("idle", "host", True),
        ("-", "host", False),
        ("-", "wrong", True),
        ("host", "-", True),
    ],
)
def test_a_run_is_worse_by_one_case(before: str, after: str, fails: bool) -> None:
    assert report.is_worse(before, after) == fails


def test_runs_are_compared_case_by_case(tmp_path: Path, command: Command) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_text(json.dumps({"key": "a[f32]", "outcome": "device"}) + "\n")
    after.write_text(json.dumps({"key": "b[f32]", "outcome": "host"}) + "\n")
    assert command("diff", before, before).code == 0
    worse = command("diff", before, after)
    assert (worse.code, "1 cases are no longer there" in worse.out) == (1, True)
    assert "a[f32]" in worse.out
    after.write_text(json.dumps({"key": "b[f32]", "outcome": "fine"}) + "\n")
    assert "there is no outcome 'fine'" in command("diff", before, after).err
    after.write_bytes(b"\x93\xff")
    assert "holds no verdicts" in command("diff", before, after).err


def test_what_is_left_out_is_in_the_database() -> None:
    names = {f"{i.name}.{i.variant_test_name}".rstrip(".") for i in cases.database()}
    assert names >= {key.partition("[")[0] for key in cases.SKIPPED}
    assert names >= COMPARED_BY.keys() | cases.LOOSER.keys() | cases.ELEMENTWISE


def test_the_share_counts_what_ran_right() -> None:
    verdicts = [
        Verdict("x[f32]", "host", "aten.median.dim: torch-mlir cannot lower it"),
        Verdict("x[f32]", "host", "aten.sort.default: on rows that are too long"),
        Verdict("x[f32]", "skipped"),
        *[Verdict("x[f32]", "device")] * 3,
    ]
    assert report.device_share([*verdicts, Verdict("x[f32]", "idle")]) == (0.6, 0.75)


def test_junit_tells_what_was_tried_and_counts() -> None:
    verdicts = [Verdict("x[f32]", "wrong", "a\x1b[0m < b"), Verdict("y[f32]", "skipped", "why")]
    verdicts.append(Verdict("z[f32]", "host", "aten.median.dim: why"))
    judged_as = {"of": "programs", "target": "cuda", "torch": "2.13"}
    root = ElementTree.fromstring(report.junit(verdicts, judged_as))
    assert root.get("name") == "npu-iree conformance programs, cuda"
    (suite,) = root
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    told = {p.get("name"): p.get("value") for p in suite.findall("properties/property")}
    assert told == {**judged_as, "share": "0.0%", "share of lowered": "0.0%"}
    outcomes = [p.get("value") for p in suite.findall("testcase/properties/property")]
    assert outcomes == [v.outcome for v in verdicts]
    assert suite.findtext("testcase/system-out") == "aten.median.dim: why"
    assert suite.findtext(".//failure") == "a\ufffd[0m < b"


def test_nothing_proves_nothing(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = command("ops", "--filter", "^no_such_op$")
    assert (none.code, "no operator matches" in none.err) == (2, True)
    (tmp_path / "taken").touch()
    for option in ("--json", "--journal"):
        nowhere = command("ops", "--filter", "^add$", option, tmp_path / "taken" / "file")
        assert (nowhere.code, "cannot be written" in nowhere.err) == (2, True)
    verdict = judge.judge(Case("_batch_norm_with_update", 0, "f16", 1, False), "", print)
    monkeypatch.setattr("npu_iree.cli.conformance.run_cases", lambda *_, **__: [verdict])
    skipped = command("ops", "--filter", "^add$", "--json", tmp_path / "file")
    assert (skipped.code, "fake kernel says f32" in skipped.out) == (1, True)
    assert read_journal(tmp_path / "file") == {verdict.key: verdict}
    for outcome, code in (("host", 1), ("idle", 1), ("device", 0)):
        verdict = Verdict(
            "x[f32]", outcome, 'aten.a.b: it cannot\naten.c.d: loc("-":2:1): it cannot'
        )
        done = command("ops", "--filter", "^add$")
        assert (done.code, "no case ran wholly on the device" in done.out) == (code, bool(code))
        assert ("\n  1 on the host: it cannot\n" in done.out) == (outcome == "host")


def test_entries_of_the_table_that_the_compiler_refuses_are_told(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = StageError("torch-to-linalg", "failed to legalize").summary
    host_ops = [HostOp(f"aten.{op}", "failed", how) for op in ("exp.default", "no_such_op.default")]
    host_ops.append(HostOp("aten.add.Tensor", "failed", f"even the smallest program ({how})"))
    (*details,) = judge.where_it_ran([Mock(host_ops=host_ops)]).details
    verdicts = [Verdict("exp[c64]", "host", "\n".join(details)), Verdict("exp[f32]", "device")]
    monkeypatch.setattr("npu_iree.cli.conformance.run_cases", lambda *_, **__: verdicts)
    done = command("ops", "--filter", "^exp$")
    told = [line for line in done.out.splitlines() if how in line]
    assert (done.code, told) == (0, [f"  aten.exp.default [c64]: {how}"])

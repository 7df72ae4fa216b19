"""The conformance suite: right ops are said to be right, and each way to fail is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from npu_iree import toolchain
from npu_iree.conformance import cases, judge, report
from npu_iree.conformance.cases import Case
from npu_iree.conformance.observe import COMPARED_BY
from npu_iree.conformance.pool import Died, Progress, run_all
from npu_iree.conformance.run import read_journal, run_cases
from npu_iree.conformance.verdict import Verdict
from npu_iree.errors import OptionError

COMMAND = (str(Path(sys.executable).parent / "npu-iree"), "conformance")
RIGHT = "^(add|mm|nn.functional.relu|median|cumsum)$"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(args, capture_output=True, text=True)


def test_right_operators_pass_and_say_where_they_ran(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("journal", "verdicts", "junit")}
    done = run(
        *COMMAND, "ops", "--filter", RIGHT, "--samples", "1", "--target", "npu-virtual",
        "--journal", str(files["journal"]), "--json", str(files["verdicts"]),
        "--junit", str(files["junit"]),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = {v.key: v.outcome for v in read_journal(files["verdicts"]).values()}
    assert found["add[f32]"] == found["mm[f32]"] == "device"
    assert found["median[f32]"] == "host"
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


def test_a_journal_is_of_one_run(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    case = Case("mm", 0, "f32", samples=1, backward=False)

    def go_on(target: str) -> list[Verdict]:
        judged_as = {"target": target}
        found = run_cases([case], nothing, jobs=1, limit_s=60, journal=journal, judged_as=judged_as)
        return list(found)

    assert go_on("npu-local") == go_on("npu-local") == [Verdict("mm[f32]", "device")]
    with pytest.raises(OptionError, match="target npu-local, not cuda"):
        go_on("cuda")
    journal.write_text("a,b\n")
    with pytest.raises(OptionError, match="is no journal"):
        go_on("npu-local")
    assert journal.read_text() == "a,b\n"


def test_a_dtype_that_is_none_is_one_clear_line() -> None:
    done = run(*COMMAND, "ops", "--dtype", "f31")
    assert done.returncode == 2
    assert "no dtype f31; there are f16" in done.stderr


def outcome(monkeypatch: pytest.MonkeyPatch, op: Callable[..., Any], *inputs: Any) -> Verdict:
    """Judge a function as if it were an entry of PyTorch's database."""
    sample = SimpleNamespace(input=inputs[0], args=inputs[1:], kwargs={})
    info = SimpleNamespace(op=op, sample_inputs=lambda *_, **__: [sample])
    monkeypatch.setattr(judge, "database", lambda: [info])
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
    assert "result 1" in verdict.detail


def test_an_error_of_ours_is_one_and_an_error_of_eagers_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def eagers(x: torch.Tensor) -> torch.Tensor:
        return x.view(7)

    assert outcome(monkeypatch, eagers, torch.ones(3)).outcome == "skipped"
    monkeypatch.setattr(toolchain, "load_capabilities", lambda name: 1 / 0)
    assert outcome(monkeypatch, torch.relu, torch.ones(3)).outcome == "error"


def _fail(kind: str, progress: Progress) -> str:
    progress(kind)
    if kind == "hang":
        signal.pause()
    if kind == "abort":
        os.abort()
    return kind


def test_a_crash_and_a_hang_end_one_case_only() -> None:
    tasks = ["fine", "abort", "hang", "fine too"]
    answers = dict(run_all(_fail, tasks, workers=2, limit_s=5))
    assert answers["fine"] == "fine"
    assert answers["fine too"] == "fine too"
    assert answers["abort"] == Died("abort", "SIGABRT")
    assert answers["hang"] == Died("hang", "no answer in 5 s")


def test_runs_are_compared_case_by_case(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_text(json.dumps({"key": "a[f32]", "outcome": "device"}) + "\n")
    after.write_text(json.dumps({"key": "a[f32]", "outcome": "host"}) + "\n")
    assert run(*COMMAND, "diff", str(before), str(before)).returncode == 0
    worse = run(*COMMAND, "diff", str(before), str(after))
    assert worse.returncode == 1
    assert "a[f32]" in worse.stdout
    assert run(*COMMAND, "diff", str(after), str(before)).returncode == 0


def test_what_is_left_out_is_in_the_database() -> None:
    names = {f"{i.name}.{i.variant_test_name}".rstrip(".") for i in cases.database()}
    assert names >= {key.partition("[")[0] for key in cases.SKIPPED}
    assert names >= COMPARED_BY.keys() | cases.LOOSER.keys()


def test_the_share_counts_what_ran_right() -> None:
    verdicts = [
        Verdict("x[f32]", "host", "aten.median.dim: torch-mlir cannot lower it"),
        Verdict("x[f32]", "host", "aten.sort.default: on rows that are too long"),
        Verdict("x[f32]", "skipped"),
        *[Verdict("x[f32]", "device")] * 3,
    ]
    assert report.device_share(verdicts) == (0.6, 0.75)


def test_nothing_proves_nothing(tmp_path: Path) -> None:
    none = run(*COMMAND, "ops", "--filter", "^no_such_op$")
    assert (none.returncode, "no operator matches" in none.stderr) == (2, True)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("these are no verdicts")
    told = run(*COMMAND, "diff", str(empty), str(empty))
    assert (told.returncode, "holds no verdicts" in told.stderr) == (2, True)

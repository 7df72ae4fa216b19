"""Random programs: right ones pass, and one that goes wrong is cut down to what matters."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from command import invoke
from npu_iree.conformance import judge_programs
from npu_iree.conformance.judge_programs import judge_program
from npu_iree.conformance.programs import Program, Statement, draw_program
from npu_iree.conformance.run import read_journal, run_cases

COMMAND = (str(Path(sys.executable).parent / "npu-iree"), "conformance", "programs")
LONG = Program(
    seed=7,
    rank=2,
    size=4,
    style="in place",
    statements=(
        Statement("v0", "x + y"),
        Statement("v1", "v0.flip(1)"),
        Statement("", "y.mul_(0.5)"),
        Statement("v2", "v1.sin()"),
        Statement("v3", "v2.transpose(0, 1)"),
    ),
    results=("v0", "v3"),
)


def judged_here(tried: Any, judge: Callable[..., Any], **_: Any) -> list[Any]:
    """Judge in this process, whose compilers are up already."""
    return [judge(one, progress=print) for one in tried]


@pytest.mark.slow
@pytest.mark.usefixtures("own_pool")
@pytest.mark.parametrize(
    ("options", "seed", "runs"),
    [
        (("--target", "npu-virtual"), 20, judged_here),
        (("--dynamic",), 19, judged_here),
        (("--device", "npu", "-j", 1), 28, run_cases),  # "npu" is for a process of its own
    ],
    ids=["--target", "--dynamic", "--device"],
)
def test_programs_give_the_numbers_of_eager(
    options: tuple[object, ...],
    seed: int,
    runs: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("npu_iree.cli.conformance.run_cases", runs)
    verdicts = tmp_path / "verdicts"
    assert {draw_program(s).style for s in (seed, seed + 1)} == {"backward", "in place"}
    programs = ("conformance", "programs", "--seed", seed, "--count", 2, "--json", verdicts)
    done = invoke(monkeypatch, capsys, *programs, *options)
    assert done.code == 0, done.out + done.err
    outcomes = [v.outcome for v in read_journal(verdicts).values()]
    assert len(outcomes) == 2
    assert "device" in outcomes


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "options", [(), ("--dynamic",), ("--target", "npu-virtual"), ("--device", "npu")]
)
def test_many_programs_give_the_numbers_of_eager(options: tuple[str, ...]) -> None:
    many = (*COMMAND, "--count", "400", "--seed", "1000", *options)
    done = subprocess.run(many, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_draws_the_same_program_again() -> None:
    drawn = [draw_program(seed) for seed in range(20)]
    assert drawn == [draw_program(seed) for seed in range(20)]
    assert len({program.source for program in drawn}) == 20
    assert {program.style for program in drawn} == {"forward", "backward", "in place"}


def test_a_statement_is_left_out_with_its_operand_in_its_place() -> None:
    (dropped,) = (p for p in LONG.shorter() if len(p.statements) == 4 and "flip" not in p.source)
    assert "v2 = v0.sin()" in dropped.source
    for shorter in LONG.shorter():
        shorter.function()(*shorter.inputs(0))


class _SinesAreCosines(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return (torch.cos if function is torch.Tensor.sin else function)(*args, **(kwargs or {}))


def test_a_program_that_goes_wrong_is_told_as_its_shortest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lie(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def compiled(*args: Any) -> Any:
            with _SinesAreCosines():
                return function(*args)

        return compiled

    monkeypatch.setattr(torch, "compile", lie)
    said: list[str] = []
    verdict = judge_program(LONG, "npu-local", said.append, device="compile", dynamic=False)
    assert verdict.outcome == "wrong"
    assert said[0] == LONG.source
    shortest = replace(LONG, statements=(Statement("v2", "x.sin()"),), results=("v2",))
    assert verdict.detail.endswith(shortest.source)


def test_an_error_is_told_with_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def compiled(calls: Any) -> Any:
            raise RuntimeError("no flips")

        return compiled

    monkeypatch.setattr(torch, "compile", refuse)
    verdict = judge_program(LONG, "npu-local", print, device="compile", dynamic=False)
    assert verdict.outcome == "error"
    assert verdict.detail.startswith("RuntimeError: no flips\ndef program(x, y, p, i):")


def test_values_that_only_rounding_tells_apart_are_not_wrong() -> None:
    """A sum in another order is another number; so is the maximum of two that are the same."""
    statements = (Statement("v0", "x.exp().sum(0, keepdim=True) - y"),)
    program = replace(LONG, style="forward", statements=statements, results=("v0",))
    inputs = program.inputs(1)
    expected = judge_programs._observe(program, judge_programs.over(program.function()), inputs)

    def told(factor: float) -> dict[str, str]:
        actual = expected | {"result 0": expected["result 0"] * factor}
        return judge_programs._problems(program, 4, 1, actual)

    assert not told(1 + 1e-6)
    assert judge_programs._of_no_last_bit(program, 4, 1, told(1.01)).keys() == {"result 0"}


def test_one_seed_is_wrong_unless_eager_is_as_unsure() -> None:
    compares = replace(LONG, statements=(Statement("v0", "(x.sin() - x.sin() > 1e-9) * 1.0"),))
    last_bit = replace(compares, statements=(Statement("v0", "(x / 3 * 3 > x) * 1.0"),))
    problems = {"result 0": "a number"}
    for program, wrong in ((compares, problems), (last_bit, {})):
        chosen = replace(program, style="forward", results=("v0",))
        assert judge_programs._of_no_last_bit(chosen, 4, 1, problems) == wrong

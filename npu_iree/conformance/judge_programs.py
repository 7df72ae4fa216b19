"""Try one random program, and cut one that goes wrong down to the statements that matter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from npu_iree.conformance.eager import where_kernels_ran
from npu_iree.conformance.judge import (
    Attempt,
    compiled_anew,
    differences,
    error_line,
    rounds_as_eager,
    where_it_ran,
)
from npu_iree.conformance.observe import observed, over
from npu_iree.conformance.pool import Progress
from npu_iree.conformance.programs import Program
from npu_iree.conformance.report import BAD
from npu_iree.conformance.verdict import Verdict
from npu_iree.report import recorded_plans
from npu_iree.torch_device.registration import register_device

# How many shorter programs are tried; each is compiled.
CUTS = 60
# How many times the table's tolerance: a program is several ops.
LOOSER = 4
SEEDS = (1, 2)


def judge_program(
    program: Program, target: str, progress: Progress, *, device: str, dynamic: bool
) -> Verdict:
    """Try a program; one that fails is told as the shortest that fails in the same way.

    Args:
        program: what to try.
        target: name of an installed target.
        progress: told what is about to be done, in case it never ends.
        device: "compile", or "npu": op by op on the PyTorch device.
        dynamic: whether sizes are symbols, and another size is tried after the first.
    """
    if device == "npu":
        register_device(target)
    attempt = functools.partial(_try, target=target, device=device, dynamic=dynamic)
    progress(program.source)
    found = attempt(program)
    if found.outcome not in BAD:
        return Verdict(program.key, found.outcome, "\n".join(found.details)[:2000])
    shortest, cuts = program, CUTS
    candidates = shortest.shorter()
    while cuts and (candidate := next(candidates, None)) is not None:
        cuts -= 1
        progress(candidate.source)
        if _alike(cut := attempt(candidate), found):
            shortest, found, candidates = candidate, cut, candidate.shorter()
    return Verdict(program.key, found.outcome, f"{found.details[0][:1000]}\n{shortest.source}")


def _alike(one: Attempt, other: Attempt) -> bool:
    """Say whether two programs fail in the same way; all errors of one class are one."""
    if one.outcome != other.outcome:
        return False
    return one.outcome == "wrong" or one.details[0].split(":")[0] == other.details[0].split(":")[0]


def _try(program: Program, *, target: str, device: str, dynamic: bool) -> Attempt:
    function = over(program.function())
    compiled, where = compiled_anew(function, target, dynamic=dynamic), "cpu"
    if device == "npu":
        compiled, where = function, device
    sizes = (program.size, program.size + 2) if dynamic else (program.size,)
    try:
        with recorded_plans() as plans:
            actual = {
                (size, seed): _observe(program, compiled, program.inputs(seed, size), where)
                for size in sizes
                for seed in SEEDS
            }
    except Exception as error:  # a program may fail in any way; the next one must not notice
        return Attempt("error", [error_line(error)])
    for size in sizes:
        problems = [_problem(program, size, seed, actual[size, seed]) for seed in SEEDS]
        # Sorting, maxima and comparisons turn the last bit of a value into all of another. That
        # hits few inputs; a program that was compiled wrong gives other numbers for all.
        if all(problems):
            return Attempt("wrong", problems[:1])
    return where_kernels_ran() if device == "npu" else where_it_ran(plans)


def _problem(program: Program, size: int, seed: int, actual: list[Any]) -> str:
    """Say what differs from eager's, by more than eager's from what wider floats give."""
    function, inputs = over(program.function()), program.inputs(seed, size)
    expected = _observe(program, function, inputs)
    if not (problems := differences(actual, expected, LOOSER)):
        return ""
    exact = _observe(program, function, [_widened(t) for t in inputs])
    real = (p for i, p in problems.items() if not rounds_as_eager(i, actual, expected, exact))
    return next(real, "")


def _observe(
    program: Program,
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    device: str = "cpu",
) -> list[Any]:
    sample = SimpleNamespace(input=inputs[0], args=tuple(inputs[1:]), kwargs={})
    writes = program.style == "in place"
    return observed(program, function, [sample], device=device, arguments=writes)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)

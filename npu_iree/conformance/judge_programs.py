"""Try one random program, and cut one that goes wrong down to the statements that matter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from npu_iree.conformance.eager import where_kernels_ran
from npu_iree.conformance.judge import (
    Attempt,
    compiled_anew,
    differences,
    error_line,
    not_of_rounding,
    where_it_ran,
)
from npu_iree.conformance.observe import observed, over
from npu_iree.conformance.pool import Progress
from npu_iree.conformance.programs import Program
from npu_iree.conformance.verdict import BAD, Verdict
from npu_iree.report import recorded_plans
from npu_iree.torch_device.registration import register_device

# How many shorter programs are tried; each is compiled.
CUTS = 60
# How many times the table's tolerance: a program is several ops.
LOOSER = 4
SEEDS = (1, 2)
# How often inputs are moved, and by how many of their last bits: about what a program's ops round.
MOVES, LAST_BITS = 8, 8


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
    verdict, cuts = _failed(program, program, found), CUTS
    candidates = program.shorter()
    while cuts and (candidate := next(candidates, None)) is not None:
        cuts -= 1
        progress(verdict)  # which stands, should there be no time for more
        if _alike(cut := attempt(candidate), found):
            found, candidates = cut, candidate.shorter()
            verdict = _failed(program, candidate, cut)
    return verdict


def _failed(program: Program, shortest: Program, found: Attempt) -> Verdict:
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
        found = [_problems(program, size, seed, actual[size, seed]) for seed in SEEDS]
        if not all(found):
            pairs = zip(SEEDS, found, strict=True)
            found = [_of_no_last_bit(program, size, seed, one) for seed, one in pairs]
        if problem := next((p for problems in found for p in problems.values()), ""):
            return Attempt("wrong", [problem])
    if device != "npu":
        return where_it_ran(plans)
    inputs = program.inputs(SEEDS[0], sizes[0])
    return where_kernels_ran(lambda: _observe(program, compiled, inputs, where))


def _problems(program: Program, size: int, seed: int, actual: Mapping[str, Any]) -> dict[str, str]:
    """Say what differs from eager's, by more than eager's from what wider floats give."""
    function, inputs = over(program.function()), program.inputs(seed, size)
    expected = _observe(program, function, inputs)
    if not (problems := differences(actual, expected, LOOSER)):
        return {}
    exact = _observe(program, function, [_widened(t) for t in inputs])
    return not_of_rounding(problems, actual, expected, exact)


def _of_no_last_bit(
    program: Program, size: int, seed: int, problems: Mapping[str, str]
) -> dict[str, str]:
    """Take the problems of what eager gives alike for inputs that differ in their last bits.

    Sorting, maxima and comparisons turn the last bit of a value into all of another. That hits few
    inputs; where all seeds have problems, it is not asked.
    """
    if not problems:
        return {}
    function, inputs = over(program.function()), program.inputs(seed, size)
    expected = _observe(program, function, inputs)
    generator, moves = torch.Generator().manual_seed(seed), set[str]()
    for _ in range(MOVES):
        moved = _observe(program, function, [_moved(t, generator) for t in inputs])
        moves.update(differences(moved, expected, LOOSER))
    return {name: problem for name, problem in problems.items() if name not in moves}


def _moved(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    bits = torch.randn(tensor.shape, generator=generator) * LAST_BITS
    moved = tensor.detach() * (1 + bits * torch.finfo(tensor.dtype).eps)
    return moved.requires_grad_(tensor.requires_grad)


def _observe(
    program: Program,
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    device: str = "cpu",
) -> dict[str, Any]:
    sample = SimpleNamespace(input=inputs[0], args=tuple(inputs[1:]), kwargs={})
    return observed(program, function, [sample], device=device)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)

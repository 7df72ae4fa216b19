"""Try one case: torch.compile it for a target, and compare results and gradients with eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from lowering.decompositions.halves import HALVES
from lowering.dtypes import DTYPES
from lowering.plan import Plan
from npu_iree.conformance.cases import LOOSER, Case, database
from npu_iree.conformance.observe import observed, over
from npu_iree.conformance.pool import Progress
from npu_iree.conformance.verdict import OUTCOMES, Verdict
from npu_iree.report import recorded_plans
from npu_iree.tolerances import largest_difference, tolerance


def judge(case: Case, target: str, progress: Progress) -> Verdict:
    """Try a case; its outcome is the worst of its samples.

    All samples are compiled as one graph, since that is the quickest way to see that all is well;
    where it is not, each is compiled by itself.

    Args:
        case: the case.
        target: name of an installed target.
        progress: told what is about to be done, in case it never ends.
    """
    samples, problem = take_samples(case)
    if not samples:
        return Verdict(case.key, "skipped", problem)
    progress("all samples")
    tried = [_try(case, samples, target)]
    if len(samples) > 1 and not tried[0].is_clear:
        tried = []
        for i, sample in enumerate(samples):
            progress(f"sample {i}")
            tried.append(_try(case, [sample], target))
    outcome = max((t.outcome for t in tried), key=OUTCOMES.index)
    details = dict.fromkeys(line for t in tried if t.outcome == outcome for line in t.details)
    return Verdict(case.key, outcome, "\n".join(details)[:2000])


@dataclass(frozen=True)
class Attempt:
    """What came of compiling some samples as one graph.

    Attributes:
        outcome: one of `OUTCOMES`.
        details: the host ops with their reasons, or what was wrong.
        is_clear: whether the samples one by one could tell no more.
    """

    outcome: str
    details: Sequence[str] = ()
    is_clear: bool = False


def take_samples(case: Case) -> tuple[list[Any], str]:
    """Take the samples that eager can do, and say what it raised at another."""
    info = database()[case.position]
    torch.manual_seed(0)
    samples = list(info.sample_inputs("cpu", DTYPES[case.dtype], requires_grad=case.backward))
    count = min(case.samples or len(samples), len(samples))
    taken, problem = [], "it has no samples"
    for i in range(count):
        sample = samples[i * len(samples) // count]
        try:
            observed(case, over(info.op), [sample])
        except Exception as error:  # whatever eager says: then there is nothing to compare with
            problem = f"eager: {error_line(error)}"
        else:
            taken.append(sample)
    return taken, problem


def _try(case: Case, samples: Sequence[Any], target: str) -> Attempt:
    function = over(database()[case.position].op)
    expected = observed(case, function, samples)
    compiled = compiled_anew(function, target)
    try:
        with recorded_plans() as plans:
            actual = observed(case, compiled, samples)
    except Exception as error:  # a case may fail in any way; the next one must not notice
        return Attempt("error", [error_line(error)])
    problems = differences(actual, expected, LOOSER.get(case.name, 1))
    if problems and DTYPES[case.dtype] in HALVES:
        exact = observed(case, function, [_widened(s) for s in samples])
        problems = {
            i: p for i, p in problems.items() if not rounds_as_eager(i, actual, expected, exact)
        }
    if problems:
        return Attempt("wrong", [next(iter(problems.values()))])
    return where_it_ran(plans)


def compiled_anew(
    function: Callable[..., Any], target: str, *, dynamic: bool = False
) -> Callable[..., Any]:
    """Compile for a target what nothing is known of, with counters at zero.

    Args:
        function: what `over` returned.
        target: name of an installed target.
        dynamic: whether sizes are symbols from the first call on.
    """
    torch._dynamo.reset()
    counters.clear()
    options: dict[str, Any] = {"target": target, "rng": "host"}
    return torch.compile(function, backend="npu_iree", dynamic=dynamic or None, options=options)


def where_it_ran(plans: Sequence[Plan]) -> Attempt:
    """Say whether all of what was compiled, and was right, runs on the device."""
    if breaks := counters["graph_break"]:
        return Attempt("host", [f"graph break: {_first_line(text)}" for text in breaks])
    if not plans:
        return Attempt("host", ["nothing was captured"])
    unable = [op for plan in plans for op in plan.host_ops if op.is_inability]
    if unable:
        details = [f"{op.op}: {_first_line(op.reason)}" for op in unable]
        return Attempt("host", details, is_clear=True)
    return Attempt("device", is_clear=True)


def differences(actual: list[Any], expected: list[Any], looser: int) -> dict[int, str]:
    """Say which results differ from eager's by more than the tolerance, and how."""
    if len(actual) != len(expected):
        return {-1: f"{len(actual)} results, eager has {len(expected)}"}
    found = {}
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if (one is None) != (other is None):
            found[i] = f"gradient {i} is None on one side only"
        if one is None or other is None:
            continue
        rtol, atol = (looser * t for t in tolerance(other.dtype))
        try:
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            found[i] = f"result {i} of {list(other.shape)}: {error_line(error)} {str(error)[-300:]}"
    return found


def rounds_as_eager(i: int, actual: list[Any], expected: list[Any], exact: list[Any]) -> bool:
    """Say whether a result differs from eager's only in how it was rounded.

    Eager rounds after each of its ops, a compiled graph after others. What counts is how far both
    are from what wider floats give, in parts of the largest value (the rule of PyTorch's own
    benchmarks): ours may be twice as far as eager's.
    """
    if i < 0 or i >= len(exact) or actual[i] is None or actual[i].dtype != expected[i].dtype:
        return False
    truth = exact[i].double()
    if actual[i].shape != truth.shape or not actual[i].dtype.is_floating_point:
        return False
    ours, eagers = (largest_difference(t[i].double(), truth) for t in (actual, expected))
    return ours <= max(2 * eagers, tolerance(actual[i].dtype)[0])


def _widened(sample: Any) -> Any:
    """Return a sample with floats for its halves."""
    parts = pytree.tree_map_only(
        torch.Tensor,
        lambda t: t.detach().float() if t.dtype.is_floating_point else t,
        (sample.input, sample.args, sample.kwargs),
    )
    return SimpleNamespace(input=parts[0], args=parts[1], kwargs=parts[2])


def error_line(error: BaseException) -> str:
    """Tell an error in one line."""
    return f"{type(error).__name__}: {_first_line(str(error))}"[:400]


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")

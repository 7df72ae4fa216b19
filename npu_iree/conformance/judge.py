"""Try one case: torch.compile it for a target, and compare results and gradients with eager's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from lowering.decompositions.halves import HALVES
from lowering.dtypes import DTYPES
from lowering.errors import first_line
from lowering.plan import Plan
from npu_iree.conformance.cases import LOOSER, SKIPPED, Case, database, is_elementwise
from npu_iree.conformance.observe import observed, over
from npu_iree.conformance.pool import Progress
from npu_iree.conformance.verdict import BAD, OUTCOMES, Verdict
from npu_iree.report import recorded_plans
from npu_iree.tolerances import largest_finite, tolerance


def judge(case: Case, target: str, progress: Progress) -> Verdict:
    """Try a case; its outcome is the worst of its samples.

    All samples are compiled as one graph, since that is the quickest way to see that all is well;
    where it is not, each is compiled by itself.

    Args:
        case: the case.
        target: name of an installed target.
        progress: told what is about to be done, in case it never ends.
    """
    samples, left_out = take_samples(case)
    if not samples:
        return Verdict(case.key, "skipped", left_out)
    progress("all samples")
    tried = [together := _try(case, samples, target)]
    if len(samples) > 1 and not together.is_clear:
        tried = []
        for i, sample in enumerate(samples):
            progress(f"sample {i}")
            tried.append(_try(case, [sample], target))
    outcome = max((t.outcome for t in tried), key=OUTCOMES.index)
    details = [line for t in tried if t.outcome == outcome for line in t.details]
    if together.outcome in BAD and outcome not in BAD:
        outcome = together.outcome
        details = [f"only all samples as one graph: {line}" for line in together.details]
    told = dict.fromkeys([*details, *filter(None, [left_out])])
    return Verdict(case.key, outcome, "\n".join(told)[:2000])


def make_ready(target: str, *, operators: bool) -> None:
    """Import all that a first case would, and start the compilers.

    Args:
        target: name of an installed target.
        operators: whether the operator database is among it.
    """
    if operators:
        database()
    compiled_anew(over(torch.neg), target)([(torch.ones(1), (), {})])


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
    """Take the samples that eager can do, and say why others, or all, are left out."""
    if reason := SKIPPED.get(case.key):
        return [], reason
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
    if not taken:
        return [], problem
    left_out = count - len(taken)
    return taken, f"{left_out} of {count} samples left out: {problem}" if left_out else ""


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
        problems = not_of_rounding(
            problems, actual, expected, exact, elementwise=is_elementwise(case)
        )
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
    """Say whether all of what was compiled, and was right, runs on the device, if anything does."""
    if breaks := counters["graph_break"]:
        return Attempt("host", [f"graph break: {first_line(text)}" for text in breaks])
    if not plans:
        return Attempt("host", ["nothing was captured"])
    unable = [op for plan in plans for op in plan.host_ops if op.is_inability]
    if unable:
        details = [f"{op.op}: {first_line(op.reason)}" for op in unable]
        return Attempt("host", details, is_clear=True)
    if not any(plan.regions for plan in plans):
        chosen = dict.fromkeys(f"{op.op}: {op.reason}" for plan in plans for op in plan.host_ops)
        return Attempt("idle", list(chosen), is_clear=True)
    return Attempt("device", is_clear=True)


def differences(
    actual: Mapping[str, Any], expected: Mapping[str, Any], looser: int
) -> dict[str, str]:
    """Say what differs from eager's by more than the tolerance, and how."""
    if actual.keys() != expected.keys():
        names = sorted(actual.keys() ^ expected.keys())
        return {"results": f"only one side has {', '.join(names)}"}
    found = {}
    for name, other in expected.items():
        if problem := _difference(actual[name], other, looser):
            found[name] = f"{name}{problem}"
    return found


def _difference(one: Any, other: Any, looser: int) -> str:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        is_told = isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor) or one != other
        return f" is {_brief(one)}, eager's {_brief(other)}" if is_told else ""
    rtol, atol = (looser * t for t in tolerance(other.dtype))
    try:
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return f" of {list(other.shape)}: {error_line(error)} {str(error)[-300:]}"
    return ""


def _brief(value: Any) -> str:
    return f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def not_of_rounding(
    problems: Mapping[str, str],
    actual: Mapping[str, Any],
    expected: Mapping[str, Any],
    exact: Mapping[str, Any],
    *,
    elementwise: bool = False,
) -> dict[str, str]:
    """Take the differences that are more than how eager rounds; `exact` is of wider floats."""
    return {
        name: problem
        for name, problem in problems.items()
        if name not in exact
        or not rounds_as_eager(actual[name], expected[name], exact[name], elementwise=elementwise)
    }


def rounds_as_eager(actual: Any, expected: Any, exact: Any, *, elementwise: bool = False) -> bool:
    """Say whether a result differs from eager's only in how it was rounded.

    Eager rounds after each of its ops, a compiled graph after others. What counts is how far both
    are from what wider floats give, in parts of what the tolerance allows: each of our elements may
    be twice as far as eager's farthest. Sums round terms that may be larger than what is left of
    them, so they are allowed a share of the largest value (the rule of PyTorch's own benchmarks);
    an elementwise op is not, as its small values owe nothing to the large. Where eager's are no
    numbers, as they overflowed, ours are eager's, or as near to the truth.
    """
    if not all(isinstance(t, torch.Tensor) for t in (actual, expected, exact)):
        return False
    if actual.dtype != expected.dtype or not actual.dtype.is_floating_point:
        return False
    if not actual.shape == expected.shape == exact.shape:
        return False
    truth, (rtol, atol) = exact.double(), tolerance(actual.dtype)
    allowed = atol + rtol * truth.abs() if elementwise else rtol * largest_finite(truth)
    ours, eagers = (
        (t.double() - truth).abs() / allowed.clamp_min(1e-30) for t in (actual, expected)
    )
    limit = max(2 * float(largest_finite(eagers)), 1)
    right = (actual == expected) | (actual == exact.to(actual.dtype)) | (ours <= limit)
    return bool((right | (actual.isnan() & (expected.isnan() | exact.isnan()))).all())


def _widened(sample: Any) -> Any:
    """Return a sample with floats for its halves."""
    parts = pytree.tree_map_only(
        torch.Tensor,
        lambda t: t.detach().float() if t.dtype.is_floating_point else t,
        (sample.input, sample.args, sample.kwargs),
    )
    return SimpleNamespace(input=parts[0], args=parts[1], kwargs=parts[2])


def error_line(error: BaseException) -> str:
    """Tell an error in one line; of what Dynamo wraps, the error itself."""
    if isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    return f"{type(error).__name__}: {first_line(str(error))}"[:400]

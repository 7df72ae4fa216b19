"""Try one case: torch.compile it for a target, and compare results and gradients with eager's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from lowering.dtypes import DTYPES
from npu_iree.conformance.cases import Case, database
from npu_iree.conformance.pool import Progress
from npu_iree.tolerances import tolerance

# What came of a case, from best to worst.
OUTCOMES = ("device", "host", "skipped", "error", "wrong", "hang", "crash")


@dataclass(frozen=True)
class Verdict:
    """What came of a case.

    Attributes:
        key: of the case.
        outcome: `device` (the target can run all of it), `host` (right, and some of it had to run
            on the host),
            `skipped` (eager itself cannot do it), `error` (we raised), `wrong`, `hang`, `crash`.
        detail: the host ops, or what was wrong, in a few lines.
    """

    key: str
    outcome: str
    detail: str = ""


def judge(case: Case, target: str, progress: Progress) -> Verdict:
    """Try a case; its outcome is the worst of its samples.

    Args:
        case: the case.
        target: name of an installed target.
        progress: told what is about to be done, in case it never ends.
    """
    worst, details = 0, ["nothing was tried"]
    for i, sample in enumerate(_samples(case)):
        progress(f"sample {i}")
        outcome, detail = _try(case, sample, target)
        rank = OUTCOMES.index(outcome)
        if i == 0 or rank > worst:
            worst, details = rank, []
        if rank == worst and detail not in details:
            details.append(detail)
    return Verdict(case.key, OUTCOMES[worst], "\n".join(filter(None, details))[:2000])


def _samples(case: Case) -> list[Any]:
    info = database()[case.position]
    torch.manual_seed(0)
    samples = list(info.sample_inputs("cpu", DTYPES[case.dtype], requires_grad=case.backward))
    count = min(case.samples or len(samples), len(samples))
    return [samples[i * len(samples) // count] for i in range(count)]


def _try(case: Case, sample: Any, target: str) -> tuple[str, str]:
    info = database()[case.position]
    operator = info.op

    def function(value: Any, *args: Any, **kwargs: Any) -> Any:
        return operator(value, *args, **kwargs)

    try:
        expected = _run(function, sample, case.backward)
    except Exception as error:  # whatever eager says: then there is nothing to compare with
        return "skipped", f"eager: {_line(error)}"
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, backend="npu_iree", options={"target": target})
    try:
        actual = _run(compiled, sample, case.backward)
    except Exception as error:  # a case may fail in any way; the next one must not notice
        return "error", _line(error)
    if problem := _difference(actual, expected):
        return "wrong", problem
    counts = counters["npu_iree"]
    if counts["unsupported_ops"] or counters["graph_break"] or not counts["graphs"]:
        breaks = len(counters["graph_break"])
        return "host", f"{counts['unsupported_ops']} host ops, {breaks} graph breaks"
    return "device", ""


def _run(function: Callable[..., Any], sample: Any, backward: bool) -> list[Any]:
    """Give the tensors of the result, and of the gradients of the inputs."""
    torch.manual_seed(1)
    fresh = pytree.tree_map_only(torch.Tensor, _copied, (sample.input, sample.args, sample.kwargs))
    value, args, kwargs = fresh
    with torch.set_grad_enabled(backward):
        results = _tensors(function(value, *args, **kwargs))
    roots = [r for r in results if backward and r.requires_grad]
    if roots:
        generator = torch.Generator().manual_seed(2)
        weights = [torch.randn(r.shape, generator=generator).to(r.dtype) for r in roots]
        torch.autograd.backward(roots, weights)
    gradients = [t.grad for t in _tensors(fresh) if t.requires_grad and t.is_leaf]
    return [*(r.detach() for r in results), *gradients]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone(memory_format=torch.preserve_format)
    return copy.requires_grad_(tensor.requires_grad)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _difference(actual: list[Any], expected: list[Any]) -> str:
    """Say how results differ from eager's; empty if they do not."""
    if len(actual) != len(expected):
        return f"{len(actual)} results, eager has {len(expected)}"
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if (one is None) != (other is None):
            return f"gradient {i} is None on one side only"
        if other is None:
            continue
        rtol, atol = tolerance(other.dtype)
        try:
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            return f"result {i} of {list(other.shape)}: {_line(error)} {str(error)[-300:]}"
    return ""


def _line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:400]

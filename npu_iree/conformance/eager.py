"""Try one case op by op on the PyTorch device "npu", in-place variant included."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._dynamo.utils import counters

from npu_iree import timeline
from npu_iree.conformance.cases import LOOSER, Case, database
from npu_iree.conformance.judge import Attempt, differences, error_line, take_samples
from npu_iree.conformance.observe import observed, over
from npu_iree.conformance.pool import Progress
from npu_iree.conformance.verdict import OUTCOMES, Verdict
from npu_iree.timeline import Timepoint
from npu_iree.torch_device.registration import register_device

Function = Callable[..., Any]


def judge_eager(case: Case, target: str, progress: Progress) -> Verdict:
    """Try a case on "npu"; its outcome is the worst of its samples and variants.

    Args:
        case: the case.
        target: name of the target behind the device.
        progress: told what is about to be done, in case it never ends.
    """
    register_device(target)
    info = database()[case.position]
    variants = {"": info.op, "in place": info.inplace_variant}
    samples, left_out = take_samples(case)
    worst, details, computes = -1, list[str](), False
    for i, sample in enumerate(samples):
        for name, function in variants.items():
            if function is None:
                continue
            progress(f"sample {i} {name}")
            backward = case.backward and not name
            outcome, detail = _try(case, function, sample, backward, computes=computes)
            computes = computes or outcome == "device"
            if name and outcome == "skipped":  # eager cannot either: another dtype, a broadcast
                continue
            rank = OUTCOMES.index(outcome)
            if rank > worst:
                worst, details = rank, []
            if rank == worst and detail not in details:
                details.append(f"{name}: {detail}" if name and detail else detail)
    outcome = OUTCOMES[worst] if worst >= 0 else "skipped"
    return Verdict(case.key, outcome, "\n".join(filter(None, [*details, left_out]))[:2000])


def _try(
    case: Case, function: Function, sample: Any, backward: bool, *, computes: bool
) -> tuple[str, str]:
    call = functools.partial(observed, case, over(function), [sample], backward=backward)
    try:
        expected = call()
    except Exception as error:  # whatever eager says: then there is nothing to compare with
        return "skipped", f"eager: {error_line(error)}"
    counters.clear()
    try:
        actual = call(device="npu")
    except Exception as error:  # a case may fail in any way; the next one must not notice
        return "error", error_line(error)
    for problem in differences(actual, expected, LOOSER.get(case.name, 1)).values():
        return "wrong", problem
    ran = where_kernels_ran(None if computes else functools.partial(call, device="npu"))
    return ran.outcome, ", ".join(ran.details)


def where_kernels_ran(again: Callable[[], object] | None) -> Attempt:
    """Say whether all kernels since the counters were cleared ran on the device, if any did.

    Args:
        again: makes the same calls: to see whether the device has any work of them, in calls that
            are not judged, since calls that are watched take another way. None: it has.
    """
    on_host = [name.removeprefix("host ") for name in counters["npu_iree"] if "host " in name]
    if on_host:
        return Attempt("host", on_host)
    if again is None:
        return Attempt("device")
    seen: list[Timepoint] = []
    with timeline.observed(seen.append):
        again()
    computes = any(point.work.name.split()[0] not in _MOVES for point in seen)
    return Attempt("device" if computes else "idle")


# How names of work begin that is none of a kernel.
_MOVES = ("put", "get", "bind", "start")

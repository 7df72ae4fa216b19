"""Tell what a compile was: a line for `TORCH_LOGS=npu_iree`, artifacts for `TORCH_TRACE`."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

from torch._dynamo.utils import counters
from torch._logging._internal import trace_structured

from lowering.plan import Plan
from npu_iree.cause import Cause

log = logging.getLogger(__name__)
_recorders: list[list[Plan]] = []


# Counts that a line of a compile has only where there is something to tell.
_TOLD = {"refused_flags": "sets of flags refused", "healed_ops": "ops healed"}


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What one graph's compile was; prints itself as one line.

    Attributes:
        graph: its number.
        part: `forward`, `backward` or `inference`.
        target: name of the target.
        cause: why it was compiled.
        regions: how many device regions it has.
        host_ops: how many of its ops run on the host.
        counts: `cache_hits`, `cache_misses`, `compiles`, `compile_ms`, `denials`, `healed_ops`,
            `refused_flags` (sets of compiler flags that would have been better); what is not there
            is 0. Regions that compile at the same time each add to `compile_ms`.
        ms: what it took altogether, in milliseconds.
    """

    graph: int
    part: str
    target: str
    cause: Cause
    regions: int
    host_ops: int
    counts: Mapping[str, int]
    ms: int

    def __str__(self) -> str:
        count = self.counts.get
        cache = f"{count('cache_hits', 0)} hits, {count('cache_misses', 0)} misses"
        told = "".join(f", {count(name)} {what}" for name, what in _TOLD.items() if count(name))
        return (
            f"graph {self.graph} ({self.part}) for {self.target}: {self.cause}; "
            f"{self.regions} regions ({cache}), {count('compiles', 0)} compiles{told}, "
            f"{self.host_ops} host ops, {self.ms} ms"
        )


@contextlib.contextmanager
def recorded_plans() -> Iterator[list[Plan]]:
    """Collect the plan of each graph that is compiled meanwhile, by whichever thread."""
    plans: list[Plan] = []
    _recorders.append(plans)
    try:
        yield plans
    finally:
        _recorders[:] = [other for other in _recorders if other is not plans]


def tell(report: CompileReport, plan: Plan) -> None:
    """Count a compiled graph, log it, and enter it into the trace."""
    for plans in _recorders:
        plans.append(plan)
    counters["npu_iree"]["graphs"] += 1
    counters["npu_iree"]["regions"] += len(plan.regions)
    counters["npu_iree"]["host_ops"] += len(plan.host_ops)
    counters["npu_iree"]["unsupported_ops"] += sum(op.is_inability for op in plan.host_ops)
    if unsupported := [op for op in plan.host_ops if op.kind == "unsupported"]:
        listed = "\n  ".join(map(str, unsupported))
        log.warning(
            "graph %d: %d ops run on the host:\n  %s", report.graph, len(unsupported), listed
        )
    log.info("%s", report)
    log.debug("graph %d: plan:\n%s", report.graph, plan)
    _trace("npu_iree_compile", "json", lambda: json.dumps(asdict(report), indent=1))
    _trace("npu_iree_plan", "string", lambda: "\n".join([str(plan), "", *map(str, plan.host_ops)]))


def _trace(name: str, encoding: str, text: Callable[[], str]) -> None:
    """Write an artifact that tlparse shows beside Dynamo's own of the same compile."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=text,
        expect_trace_id=False,  # graphs are compiled without Dynamo, too
    )

"""Run cases in killable processes, with a journal from which a stopped run goes on."""

from __future__ import annotations

import functools
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from npu_iree.conformance.cases import Case
from npu_iree.conformance.pool import Died, Progress, run_all
from npu_iree.conformance.verdict import Verdict
from npu_iree.settings import turn_cache_off


def run_cases(
    cases: Sequence[Case],
    target: str,
    *,
    jobs: int,
    limit_s: float,
    journal: Path | None = None,
    eager: bool = False,
) -> Iterator[Verdict]:
    """Try cases, and give each verdict as it comes, those of the journal first.

    Args:
        cases: what to try.
        target: name of an installed target.
        jobs: how many processes.
        limit_s: seconds that a case may take before its process is killed: a hang.
        journal: a file that takes each verdict at once; those in it are not tried again.
        eager: op by op on the PyTorch device "npu", instead of by `torch.compile`.
    """
    known = read_journal(journal)
    yield from (known[case.key] for case in cases if case.key in known)
    todo = [case for case in cases if case.key not in known]
    function = functools.partial(_judge, target=target, eager=eager)
    for case, answer in run_all(function, todo, workers=jobs, limit_s=limit_s):
        verdict = _died(case, answer) if isinstance(answer, Died) else answer
        if journal is not None:
            _append(journal, verdict)
        yield verdict


def _append(journal: Path, verdict: Verdict) -> None:
    """Add a line; half a line before it, of a run that was killed, is ended first."""
    with journal.open("a+b") as lines:
        if lines.tell() and (lines.seek(-1, 2), lines.read(1))[1] != b"\n":
            lines.write(b"\n")
        lines.write(json.dumps(asdict(verdict)).encode() + b"\n")


def read_journal(journal: Path | None) -> dict[str, Verdict]:
    """Read a journal; half a line at its end, of a run that was killed, is left out."""
    known: dict[str, Verdict] = {}
    if journal is None or not journal.exists():
        return known
    for line in journal.read_text().splitlines():
        try:
            verdict = Verdict(**json.loads(line))
        except (ValueError, TypeError):
            continue
        known[verdict.key] = verdict
    return known


def _judge(case: Case, progress: Progress, *, target: str, eager: bool) -> Verdict:
    """Judge a case in a process of its own, to whose log nobody listens."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if eager:
        from npu_iree.conformance.eager import judge_eager

        return judge_eager(case, target, progress)  # cases share kernels: the cache stays on
    from npu_iree.conformance.judge import judge

    turn_cache_off()
    return judge(case, target, progress)


def _died(case: Case, died: Died) -> Verdict:
    outcome = "hang" if died.how.startswith("no answer") else "crash"
    return Verdict(case.key, outcome, f"{died.during}: {died.how}")

"""Run cases in killable processes, with a journal from which a stopped run goes on."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from npu_iree.conformance.observe import Tried
from npu_iree.conformance.pool import Died, Progress, nothing, run_all
from npu_iree.conformance.verdict import Verdict
from npu_iree.errors import OptionError
from npu_iree.settings import turn_cache_off

_JUDGED_AS = "judged as"
_Tried = TypeVar("_Tried", bound=Tried)


def run_cases(
    cases: Sequence[_Tried],
    judge: Callable[..., Verdict],
    *,
    jobs: int,
    limit_s: float,
    journal: Path | None = None,
    judged_as: Mapping[str, object] = MappingProxyType({}),
    cached: bool = False,
    make_ready: Callable[[], None] = nothing,
) -> Iterator[Verdict]:
    """Try cases, and give each verdict as it comes, those of the journal first.

    Args:
        cases: what to try.
        judge: a module's function, or a partial one, of a case and `progress`.
        jobs: how many processes.
        limit_s: seconds that a case may take before its process is killed: a hang.
        journal: a file that takes each verdict at once; those in it are not tried again.
        judged_as: the target and all else that decides verdicts; a journal is of one such run.
        cached: whether compiled code is taken from the cache, and kept there.
        make_ready: what each process does first, in no case's time; should it raise, so will cases.

    Raises:
        OptionError: the journal is of another run.
    """
    if journal is not None:
        _begin(journal, judged_as)
    known = read_journal(journal)
    yield from (known[case.key] for case in cases if case.key in known)
    todo = [case for case in cases if case.key not in known]
    first = functools.partial(_make_ready, make_ready, cached)
    function = functools.partial(_judge, judge=judge)
    for case, answer in run_all(function, todo, workers=jobs, limit_s=limit_s, make_ready=first):
        verdict = _died(case, answer) if isinstance(answer, Died) else answer
        if journal is not None:
            append_line(journal, asdict(verdict))
        yield verdict


def _begin(journal: Path, judged_as: Mapping[str, object]) -> None:
    """Write the journal's first line, or see that it is of a run like this one."""
    lines = _lines_of(journal)
    if not lines:
        journal.parent.mkdir(parents=True, exist_ok=True)
        append_line(journal, {_JUDGED_AS: dict(judged_as)})
        return
    try:
        before = dict(json.loads(lines[0])[_JUDGED_AS])
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(f"{journal} is no journal: its first line says of no run") from error
    if before != judged_as:
        names = sorted(n for n in {**before, **judged_as} if before.get(n) != judged_as.get(n))
        differ = ", ".join(
            f"{n} {_brief(before.get(n))}, not {_brief(judged_as.get(n))}" for n in names
        )
        raise OptionError(f"{journal} is of another run ({differ}); take another file")


def _brief(value: object) -> str:
    """Tell a digest by how it begins."""
    return str(value)[:12] if len(str(value)) == 64 else str(value)


def append_line(journal: Path, line: Mapping[str, object]) -> None:
    """Add a line; half a line before it, of a run that was killed, is ended first."""
    with journal.open("a+b") as lines:
        if lines.tell() and (lines.seek(-1, 2), lines.read(1))[1] != b"\n":
            lines.write(b"\n")
        lines.write(json.dumps(line).encode() + b"\n")


def read_journal(journal: Path | None) -> dict[str, Verdict]:
    """Read a journal; half a line at its end, of a run that was killed, is left out."""
    known: dict[str, Verdict] = {}
    for line in _lines_of(journal):
        try:
            verdict = Verdict(**json.loads(line))
        except (ValueError, TypeError):
            continue
        known[verdict.key] = verdict
    return known


def _lines_of(journal: Path | None) -> list[str]:
    if journal is None or not journal.exists():
        return []
    return journal.read_text(errors="replace").splitlines()


def _make_ready(make_ready: Callable[[], None], cached: bool) -> None:
    """Begin a process of its own, to whose log nobody listens."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if not cached:
        turn_cache_off()
    with contextlib.suppress(Exception):
        make_ready()


def _judge(case: Tried, progress: Progress, *, judge: Callable[..., Verdict]) -> Verdict:
    return judge(case, progress=progress)


def _died(case: Tried, died: Died) -> Verdict:
    if isinstance(died.so_far, Verdict):
        return died.so_far
    return Verdict(case.key, died.kind, f"{died.during}: {died.how}")

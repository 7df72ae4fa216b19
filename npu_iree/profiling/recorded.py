"""What IREE recorded of the calls of a function, as typed values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DISPATCH, WHOLE = "dispatch", "execute"


@dataclass(frozen=True)
class Execution:
    """One piece of device work; times are those of `time.perf_counter_ns`.

    Attributes:
        name: of the device program, or what it is if it is none: `fill`, `copy`, `alloca`, ...
        op: `dispatch`, or as `name`.
        submission: which submission to the queue it is part of.
        start_ns: when its first tile began.
        end_ns: when its last one had ended.
        tiles_ns: the times of its tiles, in all threads, added up.
        nbytes: of a fill, copy or allocation.
    """

    name: str
    op: str
    submission: int
    start_ns: int
    end_ns: int
    tiles_ns: int
    nbytes: int

    @property
    def duration_ns(self) -> int:
        """How long it took, by the clock on the wall."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Submission:
    """One submission to the queue.

    Attributes:
        number: what executions know it by.
        op: `execute`, `alloca`, ...
        submitted_ns: when the host handed it over.
        ready_ns: when what it waits for had ended.
        nbytes: of a fill, copy or allocation.
    """

    number: int
    op: str
    submitted_ns: int
    ready_ns: int
    nbytes: int


@dataclass(frozen=True)
class Recorded:
    """All of it, in the order of its times.

    Attributes:
        executions: the pieces of work.
        wholes: what a submission of several pieces took from the first to the last.
        submissions: to the queue.
    """

    executions: tuple[Execution, ...]
    wholes: tuple[Execution, ...]
    submissions: tuple[Submission, ...]

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> Recorded:
        """Take it from records of `iree-profile export`.

        Raises:
            KeyError: they lack a field.
        """
        by_type: dict[str, list[Mapping[str, Any]]] = {}
        for record in records:
            by_type.setdefault(record["record_type"], []).append(record)
        events = map(_execution, by_type.get("host_execution_event", ()))
        executions = sorted(events, key=lambda e: e.start_ns)
        submissions = map(_submission, by_type.get("queue_event", ()))
        return cls(
            tuple(e for e in executions if e.op != WHOLE),
            tuple(e for e in executions if e.op == WHOLE),
            tuple(sorted(submissions, key=lambda s: s.submitted_ns)),
        )

    def idle_ns(self) -> list[int]:
        """Return of each submission of several pieces how long none of its work ran."""
        by_submission: dict[int, list[Execution]] = {}
        for e in self.executions:
            by_submission.setdefault(e.submission, []).append(e)
        return [_idle_ns(whole, by_submission.get(whole.submission, ())) for whole in self.wholes]


def _idle_ns(whole: Execution, parts: Iterable[Execution]) -> int:
    """Take the times at which some part runs, several or one, from all; they are in order."""
    idle, reached = 0, whole.start_ns
    for part in parts:
        idle += max(0, part.start_ns - reached)
        reached = max(reached, part.end_ns)
    return idle + max(0, whole.end_ns - reached)


def _execution(record: Mapping[str, Any]) -> Execution:
    return Execution(
        name=record["key"] or record["op"],
        op=record["op"],
        submission=record["submission_id"],
        start_ns=record["start_host_time_ns"],
        end_ns=record["end_host_time_ns"],
        tiles_ns=record["tile_duration_sum_ns"],
        nbytes=record["payload_length"],
    )


def _submission(record: Mapping[str, Any]) -> Submission:
    return Submission(
        number=record["submission_id"],
        op=record["op"],
        submitted_ns=record["host_time_ns"],
        ready_ns=record["ready_host_time_ns"],
        nbytes=record["payload_length"],
    )

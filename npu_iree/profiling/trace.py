"""A profile as a trace that Perfetto and chrome://tracing show.

There are two processes on one clock, one after the other: the calls of this package, with the host,
the queue and the transfers; then the same calls in IREE's own runner, which alone can record each
device program. Source: the Trace Event Format (JSON) of Chromium.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from npu_iree.profiling.measure import HostCalls, Measured
from npu_iree.profiling.profile import Row
from npu_iree.profiling.recorded import DISPATCH, Recorded

Event = dict[str, Any]
_LANES = 100  # how many threads of a trace one track may take
_MOVES = ("copy", "fill", "update", "read", "write")


@dataclass(frozen=True)
class _Slice:
    """Something that took time, in nanoseconds of `time.perf_counter_ns`."""

    name: str
    start_ns: float
    end_ns: float
    args: Mapping[str, Any] = field(default_factory=dict)


def trace_text(measured: Measured) -> str:
    """Return a trace as the viewers read it."""
    return json.dumps({"traceEvents": trace_events(measured), "displayTimeUnit": "ms"})


def trace_events(measured: Measured) -> list[Event]:
    """Return the events of a trace; its time begins with the first call."""
    first_ns = min((start for start, _ in measured.host.calls), default=0.0) * 1e9
    rows = {row.name: row for row in measured.profile.rows}
    processes = {
        "npu_iree": _host_tracks(measured.host),
        "device, in iree-benchmark-module": _device_tracks(measured.recorded, rows),
    }
    events: list[Event] = []
    for pid, (process, tracks) in enumerate(processes.items(), 1):
        events.append(_name("process_name", pid, 0, process))
        for position, (track, slices) in enumerate(tracks.items()):
            events += _track(pid, position * _LANES, track, slices, first_ns)
    return events


def _host_tracks(host: HostCalls) -> dict[str, list[_Slice]]:
    """Put calls and waits on the host, regions on the queue, and what crosses on its own track.

    The ledger knows when a wait begins; it is drawn to the end of its call.
    """
    work = [s for s in host.spans if s.name == host.program]
    moves = [s for s in host.spans if s.name != host.program]
    waits = [
        _Slice(f"wait for {t.value}", t.at_s * 1e9, _end_of_call(t.at_s, host) * 1e9)
        for t in host.transfers
        if t.kind == "wait"
    ]
    crossed = [
        _Slice(
            f"{t.mode} {t.kind} of {t.value}",
            t.at_s * 1e9,
            t.at_s * 1e9,
            {"bytes": t.nbytes, "for": t.owner},
        )
        for t in host.transfers
        if t.kind != "wait"
    ]
    calls = [_Slice(f"call {i}", s * 1e9, e * 1e9) for i, (s, e) in enumerate(host.calls)]
    return {
        "host": [*calls, *waits],
        "queue": [_Slice(s.name, s.submitted_s * 1e9, s.ended_s * 1e9) for s in work],
        "transfers": [
            *crossed,
            *(_Slice(s.name, s.submitted_s * 1e9, s.ended_s * 1e9) for s in moves),
        ],
    }


def _end_of_call(at_s: float, host: HostCalls) -> float:
    return next((end for start, end in host.calls if start <= at_s <= end), at_s)


def _device_tracks(recorded: Recorded, rows: Mapping[str, Row]) -> dict[str, list[_Slice]]:
    ends: dict[int, int] = {}
    for e in (*recorded.executions, *recorded.wholes):
        ends[e.submission] = max(e.end_ns, ends.get(e.submission, 0))
    work = [_Slice(e.name, e.start_ns, e.end_ns, _args(rows[e.name])) for e in recorded.executions]
    kinds = [e.op for e in recorded.executions]
    moves = [s for s, kind in zip(work, kinds, strict=True) if kind in _MOVES]
    return {
        "host: submissions": [
            _Slice(f"submit {s.op}", s.submitted_ns, s.submitted_ns, {"bytes": s.nbytes})
            for s in recorded.submissions
        ],
        "queue": [
            _Slice(s.op, s.submitted_ns, ends[s.number], {"ready_ns": s.ready_ns - s.submitted_ns})
            for s in recorded.submissions
            if s.number in ends
        ],
        "dispatches": [s for s, kind in zip(work, kinds, strict=True) if kind == DISPATCH],
        "transfers on the device": moves,
    }


def _args(row: Row) -> dict[str, Any]:
    if not row.is_dispatch:
        return {}
    work = {"bytes": row.nbytes, "flops": row.flops, "limit": row.limit, "of_limit": row.of_limit}
    return {**work, "threads": row.threads, "ops": [f"{op} at {line}" for op, line in row.ops]}


def _track(
    pid: int, tid: int, name: str, slices: Iterable[_Slice], first_ns: float
) -> Iterator[Event]:
    """Return the events of a track; what neither follows nor is inside another gets a new line."""
    yield _name("thread_name", pid, tid, name)
    lanes: list[list[float]] = [[]]  # of each, when what is open will end; the innermost last
    for s in sorted(slices, key=lambda s: (s.start_ns, -s.end_ns)):
        lane = next((i for i, ends in enumerate(lanes) if _fits(ends, s)), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            yield _name("thread_name", pid, tid + lane, f"{name} {lane}")
        lanes[lane].append(s.end_ns)
        at_us, took_us = (s.start_ns - first_ns) / 1e3, (s.end_ns - s.start_ns) / 1e3
        place = {"name": s.name, "cat": name, "pid": pid, "tid": tid + lane, "ts": at_us}
        kind = {"ph": "X", "dur": took_us} if took_us > 0 else {"ph": "i", "s": "t"}
        yield {**place, **kind, "args": dict(s.args)}


def _fits(ends: list[float], new: _Slice) -> bool:
    """Say whether a slice begins after all others of a line have ended, or is inside them."""
    while ends and ends[-1] <= new.start_ns:
        ends.pop()
    return not ends or new.end_ns <= ends[-1]


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}

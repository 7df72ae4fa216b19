"""Profile an entry point: time its calls, watch the host in a few, record the device in others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_iree.offline.entry import LoadedEntry
from npu_iree.offline.load import LoadedProgram
from npu_iree.offline.parameters import file_beside
from npu_iree.profiling.profile import WARM_UP, Profile, median_s, shares
from npu_iree.profiling.rates import machine_rates
from npu_iree.profiling.recorded import Recorded
from npu_iree.profiling.tools import record_calls
from npu_iree.recording import Span, record_timeline
from npu_iree.transfers import Transfer, record_transfers

_WATCHED = 3
_LIMIT_S, _SLOWER = 300.0, 20  # most that recording takes: to begin, and times a call of ours


@dataclass(frozen=True)
class HostCalls:
    """Calls as the host sees them; times are those of `time.perf_counter`.

    Attributes:
        program: what the calls' own work is called among the spans.
        calls: start and end of each.
        spans: the work that they submitted.
        transfers: the ledger of what crossed, and of waits.
    """

    program: str
    calls: tuple[tuple[float, float], ...]
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class Measured:
    """A profile, and what it was made from."""

    profile: Profile
    host: HostCalls
    recorded: Recorded


def measure(
    program: LoadedProgram,
    function: LoadedEntry,
    leaves: Sequence[Any],
    *,
    calls: int,
    params: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Profile an entry point.

    Args:
        program: the artifact.
        function: the entry point.
        leaves: of the arguments of its call.
        calls: how many are counted.
        params: the file that was bound instead of the artifact's own.
        tell: is told what is about to be done.

    Raises:
        ArgumentError: the arguments are not what was compiled for.
        NpuIreeError, TargetError: IREE's tools are missing, or cannot record on this target.
    """
    values = function.taken(leaves)  # of states: as they are before the first call
    tell("measuring the machine")
    rates = machine_rates()
    tell("timing calls")
    call_s = _call_s(function, leaves, calls)
    tell("watching the host")
    host = watch_host(function, leaves)
    tell("recording the device")
    manifest = program.manifest
    name = manifest.parameter_file
    beside = file_beside(program.path, name) if name else None
    records = record_calls(
        program.path,
        function.name,
        values,
        driver=program.device.target.driver,
        parameters=params or beside,
        calls=calls + WARM_UP,
        limit_s=_LIMIT_S + _SLOWER * call_s * (calls + WARM_UP),
    )
    recorded = Recorded.of(records)
    profile = Profile(
        entry=function.name,
        calls=calls,
        call_s=call_s,
        queue_s=median_s([e.duration_ns for e in recorded.wholes], calls),
        between_s=median_s(recorded.idle_ns(), calls),
        rates=rates,
        rows=shares(recorded, calls, manifest.dispatches, rates),
        knows_lines=bool(manifest.dispatches),
    )
    return Measured(profile, host, recorded)


def watch_host(function: LoadedEntry, leaves: Sequence[Any]) -> HostCalls:
    """Make some calls, and note what they submit and what crosses."""
    calls = []
    with record_timeline() as timeline, record_transfers() as ledger:
        for _ in range(_WATCHED):
            started = time.perf_counter()
            function.call_flat(leaves)
            calls.append((started, time.perf_counter()))
    return HostCalls(function.work_name, tuple(calls), tuple(timeline.spans), tuple(ledger.entries))


def _call_s(function: LoadedEntry, leaves: Sequence[Any], calls: int) -> float:
    times = []
    for _ in range(calls + WARM_UP):
        started = time.perf_counter()
        function.call_flat(leaves)
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:])

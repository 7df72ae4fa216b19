"""The profile of an entry point: each device program's part of a call, and how near its limit."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowering.manifest import Dispatch
from npu_iree.profiling.recorded import DISPATCH, Recorded

WARM_UP = 2  # calls that are recorded and not counted


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one device program, or one kind of other device work, is of a call.

    Attributes:
        name: its name in the module, or `fill`, `copy`, `alloca`, ...
        is_dispatch: whether it is a device program.
        runs: how often it runs in a call.
        seconds: what all its runs in a call take; the median of the calls, or where it does not run
            as often in each, the mean.
        share: of the device time of a call.
        threads: how many worked on it, on average.
        ops: op names and the lines of the model that it computes.
        nbytes: what one run moves, by its operands and results; None: not known.
        flops: the arithmetic of one run; None: not known.
        limit: `memory` or `compute`, whichever allows it less, or empty.
        of_limit: the time that the machine's rates allow, over the time that it takes.
    """

    name: str
    is_dispatch: bool
    runs: float
    seconds: float
    share: float
    threads: float
    ops: tuple[tuple[str, str], ...] = ()
    nbytes: int | None = None
    flops: int | None = None
    limit: str = ""
    of_limit: float | None = None

    @property
    def gb_per_s(self) -> float | None:
        """The rate at which it moves bytes."""
        return self._rate(self.nbytes)

    @property
    def gflops_per_s(self) -> float | None:
        """The rate at which it computes."""
        return self._rate(self.flops)

    def _rate(self, count: int | None) -> float | None:
        known = count is not None and self.seconds > 0
        return count * self.runs / self.seconds / 1e9 if known and count is not None else None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        ops = [{"op": op, "where": where} for op, where in self.ops]
        rates = {"gb_per_s": self.gb_per_s, "gflops_per_s": self.gflops_per_s}
        return {**asdict(self), **rates, "ops": ops}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of a call goes.

    Attributes:
        entry: the entry point.
        calls: how many calls were counted.
        call_s: what a call takes that nobody records; the median.
        queue_s: what the submissions of a recorded call take, gaps between the work in them
            included; the median.
        between_s: the part of it in which none of their work runs; the median.
        rates: what the machine can do at most (`machine_rates`).
        rows: the device work of a call, the longest first.
        knows_lines: whether the artifact says what its device programs compute.
    """

    entry: str
    calls: int
    call_s: float
    queue_s: float
    between_s: float
    rates: Mapping[str, float]
    rows: tuple[Row, ...]
    knows_lines: bool

    @property
    def device_s(self) -> float:
        """The device time of a call: of work at the same time, the sum."""
        return sum(row.seconds for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        rows = [row.to_json() for row in self.rows]
        return {**asdict(self), "device_s": self.device_s, "rows": rows}


def shares(
    recorded: Recorded, calls: int, dispatches: Sequence[Dispatch], rates: Mapping[str, float]
) -> tuple[Row, ...]:
    """Divide the device time of a call.

    Args:
        recorded: what was recorded of `calls` calls and of `WARM_UP` calls before them.
        calls: how many count.
        dispatches: what the artifact says of its device programs.
        rates: what the machine can do.
    """
    groups: dict[str, list[tuple[int, int]]] = {}
    kinds = {e.name: e.op for e in recorded.executions}
    for e in recorded.executions:
        groups.setdefault(e.name, []).append((e.duration_ns, e.tiles_ns))
    seconds = {name: median_s([t for t, _ in runs], calls) for name, runs in groups.items()}
    total = sum(seconds.values())
    known = {d.name: d for d in dispatches}
    rows = []
    for name, runs in groups.items():
        dispatch = known.get(name, Dispatch(name))
        count, time_s = len(runs) / (calls + WARM_UP), seconds[name]
        limit, of_limit = _limit(dispatch, count, time_s, rates)
        spent, tiles = (sum(column) for column in zip(*runs, strict=True))
        rows.append(
            Row(
                name=name,
                is_dispatch=kinds[name] == DISPATCH,
                runs=count,
                seconds=time_s,
                share=time_s / total if total else 0.0,
                threads=tiles / spent if spent and tiles else 1.0,
                ops=dispatch.ops,
                nbytes=dispatch.nbytes,
                flops=dispatch.flops,
                limit=limit,
                of_limit=of_limit,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def median_s(durations_ns: Sequence[int], calls: int) -> float:
    """Return what the runs of a call take: the median of the calls; the mean if they differ."""
    if not durations_ns:
        return 0.0
    runs, rest = divmod(len(durations_ns), calls + WARM_UP)
    if rest:
        return sum(durations_ns) / (calls + WARM_UP) / 1e9
    sums = [sum(durations_ns[i : i + runs]) for i in range(0, len(durations_ns), runs)]
    return statistics.median(sums[WARM_UP:]) / 1e9


def _limit(
    dispatch: Dispatch, runs: float, seconds: float, rates: Mapping[str, float]
) -> tuple[str, float | None]:
    """Return what limits a device program, and how near it is to that: its bytes are needed."""
    if dispatch.nbytes is None:
        return "", None
    allowed = {
        "memory": dispatch.nbytes / rates["read_gb_per_s"] / 1e9,
        "compute": (dispatch.flops or 0) / rates["matmul_gflops"] / 1e9,
    }
    limit = max(allowed, key=allowed.__getitem__)
    if not allowed[limit] or seconds <= 0:
        return "", None
    return limit, allowed[limit] * runs / seconds

"""The timeline of what a device does: when each piece of work was submitted, started and ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from npu_iree.errors import DeviceError
from npu_iree.timeline import Timepoint, observed


@dataclass
class Span:
    """One piece of work; times are those of `time.perf_counter`, in seconds.

    Start and end are when a thread of the host noticed them, which is a moment later. Of a call so
    small that it ran on the calling thread all three are when it had ended.

    Attributes:
        name: of the work, e.g. `put a CPU tensor`, `region0`, `aten.mm.default`, `get`.
        submitted_s: when it was handed to the device.
        started_s: from when on the device could run it: what it waits for had ended.
        ended_s: when it had ended, well or not.
    """

    name: str
    submitted_s: float
    started_s: float = float("inf")
    ended_s: float = float("inf")

    def overlap_s(self, other: Span) -> float:
        """Return for how long both ran."""
        start = max(self.started_s, other.started_s)
        return max(0.0, min(self.ended_s, other.ended_s) - start)


@dataclass
class Timeline:
    """What was submitted while it was recorded, in order."""

    spans: list[Span] = field(default_factory=list)
    _watchers: list[threading.Thread] = field(default_factory=list, repr=False)

    def add(self, point: Timepoint) -> None:
        """Begin to watch a piece of work, in a thread of its own: none waits for another."""
        now = time.perf_counter()
        if point.reached:
            self.spans.append(Span(point.work.name, now, now, now))
            return
        span = Span(point.work.name, now)
        self.spans.append(span)
        watcher = threading.Thread(
            target=_watch, args=(span, point, tuple(point._after)), daemon=True
        )
        self._watchers.append(watcher)
        watcher.start()

    def complete(self) -> None:
        """Wait until all of it has ended."""
        while self._watchers:
            self._watchers.pop().join()

    def __str__(self) -> str:
        first = min((span.submitted_s for span in self.spans), default=0.0)
        lines = ["  submitted    started      ended  (milliseconds)"]
        for span in self.spans:
            times = (span.submitted_s, span.started_s, span.ended_s)
            lines.append("".join(f"{(t - first) * 1e3:11.2f}" for t in times) + f"  {span.name}")
        return "\n".join(lines)


def _watch(span: Span, point: Timepoint, before: tuple[Timepoint, ...]) -> None:
    for earlier in before:
        with contextlib.suppress(DeviceError):
            earlier.wait()
    span.started_s = time.perf_counter()
    with contextlib.suppress(DeviceError):
        point.wait()
    span.ended_s = time.perf_counter()
    span.name = point.work.name  # eager mode tells what it was after it was submitted


@contextlib.contextmanager
def record_timeline() -> Iterator[Timeline]:
    """Record the device work that is submitted in the block, in any thread.

    The end of the block waits for it. Costs a thread a piece of work: for looking, not for serving.

    Example:
        with npu_iree.record_timeline() as timeline:
            model(batch)
        print(timeline)
    """
    timeline = Timeline()
    with observed(timeline.add):
        yield timeline
    timeline.complete()

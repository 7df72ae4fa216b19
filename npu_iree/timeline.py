"""Points in time on a device: the only file that touches HAL fences and semaphores.

A semaphore's value only rises, so two invocations that may end in either order cannot share one:
each piece of work gets its own (0.2 us).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from iree.runtime import _binding as hal

from lowering.errors import first_line
from npu_iree.errors import BadValueError, DeviceError, DeviceTimeoutError

NO_WAIT: Any = hal.HalFence(0)
_MOST_LOOKED_AT = 64  # points of a history


@dataclass(frozen=True, slots=True)
class Work:
    """What a piece of device work is, for whoever sees it fail.

    Attributes:
        name: e.g. `region0`, or `put x`.
        ops: `op at user line` of what it computes.
    """

    name: str
    ops: tuple[str, ...] = ()


class Finding(Protocol):
    """What a piece of work that has run to its end may have found wrong with its arguments.

    Attributes:
        is_at_hand: whether the host can read it where it lies; else it is copied for who waits.
    """

    is_at_hand: bool

    def copy(self, ready: Timepoint) -> None:
        """Have it copied from the device when the work has ended, which somebody will wait for."""

    def error(self, work: Work) -> DeviceError | None:
        """Read it: None, if all was right."""


class Timepoint:
    """The point at which a piece of device work has ended.

    Knows the points it waits for, until it is known to have been reached itself (`reached`, which
    asks nobody): so a failure can be told from its consequences, and history does not pile up.

    Work fails in one of two ways. The device fails its fence, and with it the fences of all that
    needs it. Or it ends, having found a value wrong (`Finding`, a `BadValueError`): its fence knows
    nothing of that, so whoever asks about a point asks about those before it, too.
    """

    __slots__ = ("_after", "_error", "_finding", "fence", "reached", "work")

    def __init__(
        self,
        fence: Any,
        work: Work,
        after: Sequence[Timepoint] = (),
        finding: Finding | None = None,
    ) -> None:
        self.fence = fence
        self.work = work
        self._after: Sequence[Timepoint] = after
        self._finding = finding
        self.reached = False
        self._error: DeviceError | None = None

    def is_reached(self) -> bool:
        """Say whether the work has ended, without waiting.

        Raises:
            DeviceError: it has failed.
        """
        return self.reached or self._wait_ns(0)

    def look(self) -> bool:
        """Say whether the work has ended well; a failure is left to whoever waits."""
        if self.reached:
            return True
        try:
            return bool(self.fence.wait(timeout=0)) and self._has_ended(may_copy=False)
        except RuntimeError:
            return False

    def name(self, work: Work) -> None:
        """Say better what the work is, in what it may have found already, too."""
        self.work = work
        error = self._error
        if error is not None and all(before._error is not error for before in self._after):
            error.ops = work.ops

    def copy_finding(self) -> None:
        """Have what the work finds on its way to the host: one is about to wait for the work."""
        if (finding := self._finding) is not None and not finding.is_at_hand:
            finding.copy(self)

    def follows(self, other: Timepoint) -> bool:
        """Say whether the work waits for another, if that is not far back in its history.

        It may end before that does, if what it computes needs nothing of what it waits for.
        """
        found = [self]
        for point in found:  # the nearest first
            if point is other:
                return True
            if len(found) < _MOST_LOOKED_AT:
                found += [before for before in point._after if before not in found]
        return False

    def has_failed(self) -> bool:
        """Say whether the work has ended in a failure, without waiting."""
        return not self.reached and self._has_failed()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the work has ended; releases the interpreter lock meanwhile.

        Args:
            timeout_s: seconds to wait at most; None: for ever.

        Raises:
            DeviceError: the work, or work it depends on, failed; names the first that did.
            DeviceTimeoutError: the time is over; the work goes on.
        """
        if self.reached:
            return
        if not self._wait_ns(None if timeout_s is None else int(timeout_s * 1e9)):
            raise DeviceTimeoutError(f"{self.work.name} has not ended after {timeout_s} s")

    def wait_for_device(self) -> None:
        """Wait until the work has ended, whatever it and the work before it have found.

        Raises:
            DeviceError: as `wait`, of what the device itself has failed.
        """
        try:
            self.fence.wait()
        except RuntimeError as error:
            raise self._first_failure(str(error)) from error

    def _wait_ns(self, timeout_ns: int | None) -> bool:
        if self._error is not None:
            raise self._error.with_traceback(None)
        try:
            if not self.fence.wait(timeout=0):  # IREE rounds any other up to a millisecond
                is_latest = _LATEST.point is self or _LATEST.point in self._after
                if timeout_ns == 0 or not _block(self.fence, timeout_ns, is_polite=is_latest):
                    return False
        except RuntimeError as error:
            self._error = self._first_failure(str(error))
            raise self._error from error
        self._has_ended(may_copy=timeout_ns != 0)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def _has_ended(self, *, may_copy: bool) -> bool:
        """Say whether the work, of which the fence says that it has ended, has ended well.

        Args:
            may_copy: whether findings may be copied from the device. If not, work is taken to have
                ended well that has some which are not at hand, and nothing is forgotten.
        """
        if not self._after and self._finding is None:
            self.reached = True
            return True
        pending = [self]
        while pending:  # those far back first; of any length, so without recursion
            point = pending[-1]
            if not point.is_settled():
                # A program that does not need what it waits for may end before that does.
                unknown = [p for p in point._after if not p.is_settled() and p._has_signalled()]
                if unknown:
                    pending += unknown
                    continue
                if not point._settle(may_copy=may_copy):
                    return True
            pending.pop()
        return self.reached

    def is_settled(self) -> bool:
        """Say whether it is known how the work has ended, well or not; asks nobody."""
        return self.reached or self._error is not None

    def _has_signalled(self) -> bool:
        try:
            return bool(self.fence.wait(timeout=0))
        except RuntimeError:
            return False

    def _settle(self, *, may_copy: bool) -> bool:
        """Find out how work has ended, when that is known of all before it; False: not yet."""
        wrong = (p._error for p in self._after if isinstance(p._error, BadValueError))
        error: DeviceError | None = next(wrong, None)
        if error is None and (finding := self._finding) is not None:
            if not (finding.is_at_hand or may_copy):
                return False
            error = finding.error(self.work)
        if error is not None:  # and what is before it stays known: other threads may look now
            self._error = error
        else:
            self.reached = True
            self._after, self._finding = (), None
        return True

    def _first_failure(self, cause: str) -> DeviceError:
        """Name the first region on the way from the root of the failure to this point."""
        path = [self]
        while failed := next((p for p in path[-1]._after if p._has_failed()), None):
            path.append(failed)
        root = path[-1].work
        named = next((p.work for p in reversed(path) if p.work.ops), root)
        text = _message(cause)
        return DeviceError(named.name, named.ops, text if named is root else f"{root.name}: {text}")

    def _has_failed(self) -> bool:
        if self._error is not None:
            return True
        try:
            if self.fence.wait(timeout=0):
                self._has_ended(may_copy=False)
        except RuntimeError:
            return True
        return self._error is not None

    def __repr__(self) -> str:
        return f"<Timepoint of {self.work.name}>"


NOW = Timepoint(NO_WAIT, Work("the start"))
NOW.reached = True


class _Latest:
    """The work that was queued last, by any thread."""

    point: Timepoint | None = None


_LATEST = _Latest()


def _block(fence: Any, timeout_ns: int | None, *, is_polite: bool) -> bool:
    """Block until a fence is signalled.

    IREE's wait, once woken, spins until the thread that signals has left its callback; and the
    threads of local-task are pinned. Woken on the same CPU, we would take it away, and spin for a
    whole time slice: 4 to 8 ms of a call of 1.5, one time in four when all CPUs compute. Linux does
    not let a thread of the policy SCHED_BATCH take a CPU away when it wakes (sched(7)); nobody
    needs a right for that.

    Args:
        fence: what for.
        timeout_ns: how long at most; None: for ever.
        is_polite: take no CPU away. Right for the last work there is, after which one is free; with
            more behind it, we would hear of it late.
    """
    is_batch = is_polite and _BATCH is not None and _has_usual_policy()
    if is_batch:
        _set_policy(_BATCH)
    try:
        return bool(fence.wait() if timeout_ns is None else fence.wait(timeout=timeout_ns))
    finally:
        if is_batch:
            _set_policy(os.SCHED_OTHER)


_BATCH: Any = getattr(os, "SCHED_BATCH", None)


def _has_usual_policy() -> bool:
    with contextlib.suppress(OSError):
        return os.sched_getscheduler(0) == os.SCHED_OTHER
    return False


def _set_policy(policy: int) -> None:
    """Set the scheduling policy of the calling thread; not where a sandbox forbids it."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))


Observer = Callable[[Timepoint], None]
_OBSERVERS: list[Observer] = []


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tell an observer of each piece of work that is submitted in the block, in any thread."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


def are_observed() -> bool:
    """Say whether anybody is told of work."""
    return bool(_OBSERVERS)


def submitted(point: Timepoint) -> Timepoint:
    """Announce the end of a piece of work that has just been submitted; returns it."""
    if not point.is_settled():  # else: it ran on the calling thread, and leaves the queue as it was
        _LATEST.point = point
    for observer in _OBSERVERS:
        observer(point)
    return point


def new_fence(device: Any) -> Any:
    """Return a fence that one piece of work will signal."""
    return hal.HalFence.create_at(device.create_semaphore(0), 1)


def joined(points: Collection[Timepoint]) -> tuple[Any, Sequence[Timepoint]]:
    """Return one fence for all of `points`, and those of them that may lie ahead."""
    if not points:
        return NO_WAIT, ()
    ahead: list[Timepoint] = []
    last = None
    for point in points:
        if point is not last and not point.reached and point not in ahead:
            ahead.append(point)
        last = point  # results of one call come one after the other, and share it
    if not ahead:
        return NO_WAIT, ()
    if len(ahead) == 1:
        return ahead[0].fence, ahead
    return hal.HalFence.join([p.fence for p in ahead]), ahead


def wait_all(points: Collection[Timepoint], timeout_s: float | None = None) -> None:
    """Wait for several points behind one wait, which ends when one has failed: others go on.

    Raises:
        DeviceError: as `Timepoint.wait`.
        DeviceTimeoutError: as `Timepoint.wait`.
    """
    fence, ahead = joined(points)
    if len(ahead) > 1:  # one wait; then each point knows that it is reached
        names = ", ".join(p.work.name for p in ahead)
        Timepoint(fence, Work(names), ahead).wait(timeout_s)
    for point in ahead:
        point.wait(timeout_s)


def after_all(device: Any, points: Sequence[Timepoint]) -> Any:
    """Return a semaphore that reaches 1, or fails, when all of `points` have.

    Raises:
        RuntimeError: one of them has failed already.
    """
    fence, _ = joined(points)
    semaphore = device.create_semaphore(0)
    device.queue_alloca(1, fence, hal.HalFence.create_at(semaphore, 1))  # the least it can do
    return semaphore


class Gate:
    """A point in time that the host decides: work behind it stands still until it is opened.

    For tests of what is submitted when, and for fault injection.
    """

    def __init__(self, device: Any, name: str = "gate") -> None:
        self._semaphore = device.create_semaphore(0)
        self._is_decided = False
        self.point = Timepoint(hal.HalFence.create_at(self._semaphore, 1), Work(name))

    def open(self) -> None:
        """Let the work behind the gate run; does nothing if it is open or has failed."""
        if not self._is_decided:
            self._is_decided = True
            self._semaphore.signal(1)

    def fail(self, message: str) -> None:
        """Fail all work behind the gate with `message`; does nothing if it is open."""
        if not self._is_decided:
            self._is_decided = True
            self._semaphore.fail(message)


def _message(cause: str) -> str:
    """Strip IREE's prefixes: `synchronous semaphore failure: hal.cc:1814: UNKNOWN; boom`."""
    first = first_line(cause) or "no reason given"
    return first.rpartition("; ")[2] if "; " in first else first

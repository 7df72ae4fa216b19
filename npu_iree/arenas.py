"""Memory that stays: lent to one call at a time, for what that computes on the way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from npu_iree.timeline import NOW, Timepoint

# Reserves so many bytes of device memory; returns a HAL buffer, and what gives its pages back to
# the system while the buffer stays.
Reserve = Callable[[int], tuple[Any, Callable[[], None]]]
_MOST_FOR_WAITING = 2  # arenas large enough, beyond which calls that wait get no new ones


class Arena:
    """Device memory for what calls compute on the way, one call at a time.

    Attributes:
        buffer: a HAL buffer.
        nbytes: its size.
    """

    __slots__ = ("__weakref__", "_is_lent", "_release", "_until", "buffer", "nbytes")

    def __init__(self, buffer: Any, nbytes: int, release: Callable[[], None]) -> None:
        self.buffer = buffer
        self.nbytes = nbytes
        self._release = release
        self._is_lent = False
        self._until = NOW

    def is_free_for(self, points: Sequence[Timepoint]) -> bool:
        """Say whether a call may use it that waits for these points in time.

        The call that has used it last has ended, or this one waits for it. After a call that has
        failed, which may not have ended in all of its parts, it is never free.
        """
        if self._is_lent:
            return False
        return self._until.look() or any(point.follows(self._until) for point in points)

    def lend(self, points: list[Timepoint]) -> None:
        """Lend it to a call, and have that wait for the call that has used it last.

        What the call waits for may end before what that itself waits for: a program that folds to a
        constant waits for nothing.

        Args:
            points: what the call waits for; one may be added.
        """
        self._is_lent = True
        if not (self._until.look() or self._until in points):
            points.append(self._until)

    def has_failed(self) -> bool:
        """Say whether the call that has used it last has failed."""
        return not self._is_lent and self._until.has_failed()

    def end_with(self, ready: Timepoint) -> None:
        """Be free again when a call has ended."""
        self._until = ready
        self._is_lent = False


class Arenas:
    """The arenas of a device. Thread-safe.

    They live as long as somebody holds them: the executables that were lent them last.
    """

    def __init__(self, reserve: Reserve) -> None:
        self._reserve = reserve
        self._arenas = weakref.WeakSet[Arena]()
        self._lock = threading.Lock()

    def __contains__(self, arena: Arena) -> bool:
        """Say whether an arena may be lent again."""
        with self._lock:
            return arena in self._arenas

    def lend(
        self, nbytes: int, points: list[Timepoint], *, may_be_new: bool = True
    ) -> Arena | None:
        """Lend the smallest arena that is free and large enough, or a new one; None: neither.

        A new one takes the place of those that are smaller, and that nobody uses: their pages go
        back to the system. Calls that wait are kept from new ones, of which there are a few: any
        number of such calls may be submitted.

        Args:
            nbytes: how much a call needs.
            points: what the call waits for; the call that has used the arena last may be added.
            may_be_new: whether more memory may be reserved.
        """
        with self._lock:
            for failed in [arena for arena in self._arenas if arena.has_failed()]:
                self._arenas.discard(failed)
            arenas = [arena for arena in self._arenas if arena.nbytes >= nbytes]
            free = [arena for arena in arenas if arena.is_free_for(points)]
            if free:
                arena = min(free, key=lambda arena: arena.nbytes)
            elif may_be_new and (len(arenas) < _MOST_FOR_WAITING or all(p.look() for p in points)):
                self._retire(lambda arena: arena.nbytes < nbytes)
                try:
                    buffer, release = self._reserve(nbytes)
                except (OSError, MemoryError, RuntimeError):
                    return None  # the call itself says what it cannot allocate
                arena = Arena(buffer, nbytes, release)
                self._arenas.add(arena)
            else:
                return None
            arena.lend(points)
            return arena

    def lend_again(self, arena: Arena, points: list[Timepoint]) -> bool:
        """Lend an arena, if that is free; says whether it was. Of `points`: see `lend`."""
        with self._lock:
            if arena not in self._arenas or not arena.is_free_for(points):
                return False
            arena.lend(points)
            return True

    def give_up(self, arena: Arena) -> None:
        """Lend an arena no more: the call that it was lent to was refused."""
        with self._lock:
            self._arenas.discard(arena)

    def release(self) -> None:
        """Give the pages of all that is free back to the system.

        Memory that is not the host's goes when the executables that hold it are called next.
        """
        with self._lock:
            self._retire(lambda arena: True)

    @property
    def nbytes(self) -> int:
        """How much there is, lent or free."""
        with self._lock:
            return sum(arena.nbytes for arena in self._arenas)

    def _retire(self, which: Callable[[Arena], bool]) -> None:
        """Take arenas that nobody uses out of lending, and give their pages back."""
        for arena in list(self._arenas):
            if which(arena) and arena.is_free_for(()):
                self._arenas.discard(arena)
                arena._release()

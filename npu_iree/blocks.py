"""Memory for results: lent to one call, and lent again when the last of its results is gone."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from npu_iree.memory import Pages

_MOST_UNUSED = 1.25  # times what a call needs, beyond which a block is too large for it
_MOST_KEPT = 1.5  # times what was lent at once at the most


class Block:
    """Memory of this process for the results of calls, of one call at a time.

    Attributes:
        nbytes: its size.
    """

    __slots__ = ("__weakref__", "_is_lent", "_last", "_pages", "nbytes")

    def __init__(self, pages: Pages) -> None:
        self.nbytes = pages.nbytes
        self._pages = pages
        self._is_lent = False
        self._last = 0

    def lease(self) -> Any:
        """Return a HAL buffer of it, which is lent until that and all of its views are gone."""
        return self._pages.buffer(_Lease(self))


class _Lease:
    """What the results of a call hold."""

    __slots__ = ("_block",)

    def __init__(self, block: Block) -> None:
        self._block = block
        block._is_lent = True

    def __del__(self) -> None:
        self._block._is_lent = False  # in any thread, which may hold any lock


class Blocks:
    """The blocks of a device. Thread-safe.

    They live as long as somebody holds them: results, and the executables that were lent them.
    """

    def __init__(self, reserve: Callable[[int], Pages | None]) -> None:
        self._reserve = reserve
        self._blocks = weakref.WeakSet[Block]()
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._most_lent = 0

    def __contains__(self, block: Block) -> bool:
        """Say whether a block may be lent again."""
        with self._lock:
            return block in self._blocks

    def lend(self, nbytes: int) -> tuple[Block, Any] | None:
        """Lend the smallest block that is free and large enough, or a new one.

        A new one takes the place of those that nobody has used for the longest time, if there is
        much more than was ever lent at once.

        Args:
            nbytes: how much a call returns.

        Returns:
            The block, and a HAL buffer of it, with which it is lent (see `Block.lease`); None if
            there is neither.
        """
        with self._lock:
            blocks = list(self._blocks)
            self._most_lent = max(self._most_lent, self._lent_bytes() + nbytes)
            sizes = range(nbytes, int(nbytes * _MOST_UNUSED) + 1)
            fit = [block for block in blocks if not block._is_lent and block.nbytes in sizes]
            block = min(fit, key=lambda block: block.nbytes, default=None) or self._new(nbytes)
            if block is None:
                return None
            block._last = next(self._count)
            return block, block.lease()

    def _new(self, nbytes: int) -> Block | None:
        self._retire(self._most_lent * _MOST_KEPT - nbytes)
        try:
            pages = self._reserve(nbytes)
        except (OSError, MemoryError):
            return None  # the call itself says what it cannot allocate
        if pages is None:
            return None
        block = Block(pages)
        self._blocks.add(block)
        return block

    def release(self) -> None:
        """Give the pages of all that is free back to the system."""
        with self._lock:
            self._retire(0)
            self._most_lent = 0

    @property
    def nbytes(self) -> int:
        """How much there is, lent or free."""
        with self._lock:
            return sum(block.nbytes for block in self._blocks)

    @property
    def lent_bytes(self) -> int:
        """How much results hold, until the device has let go of the last one, too."""
        with self._lock:
            return self._lent_bytes()

    def _lent_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks if block._is_lent)

    def _retire(self, nbytes: float) -> None:
        """Take the oldest that nobody uses out of lending, until so much is left."""
        blocks = sorted(self._blocks, key=lambda block: block._last)
        held = sum(block.nbytes for block in blocks)
        for block in blocks:
            if held > nbytes and not block._is_lent:
                self._blocks.discard(block)
                block._pages.release()
                held -= block.nbytes

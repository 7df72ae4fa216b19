"""The ledger of every host copy and host wait, and budgets that forbid them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from npu_iree.errors import HostCopyError


@dataclass(frozen=True)
class Transfer:
    """One entry of the ledger.

    Attributes:
        kind: `h2d` (to the device), `d2h` (from it) or `wait` (the host stood still).
        mode: `staged` (bytes were copied), `aliased` (one memory serves both sides), or `wait`.
        nbytes: size in bytes; 0 for a wait.
        value: what moved: the name of a value of the graph, or of a weight.
        owner: the region or host segment that needed it.
        where: the user's line that made the value, if known.
        reason: why it had to be.
        at_s: when, by `time.perf_counter`.
    """

    kind: Literal["h2d", "d2h", "wait"]
    mode: Literal["staged", "aliased", "wait"]
    nbytes: int
    value: str
    owner: str
    where: str = ""
    reason: str = ""
    at_s: float = field(default_factory=time.perf_counter, compare=False, repr=False)

    def __str__(self) -> str:
        size = "" if self.kind == "wait" else f" {self.nbytes} bytes"
        what = "host waits for" if self.kind == "wait" else f"{self.mode} {self.kind} of"
        parts = [f"{what} {self.value}{size}"]
        parts += [f"for {self.owner}"] if self.owner else []
        parts += [f"({self.reason})"] if self.reason else []
        parts += [f"at {self.where}"] if self.where else []
        return " ".join(parts)


@dataclass
class Ledger:
    """What crossed between host and device while it was open, in order."""

    entries: list[Transfer] = field(default_factory=list)

    @property
    def transfers(self) -> list[Transfer]:
        """The entries in which a tensor crossed, staged or aliased."""
        return [e for e in self.entries if e.kind != "wait"]

    @property
    def waits(self) -> list[Transfer]:
        """The entries in which the host stood still."""
        return [e for e in self.entries if e.kind == "wait"]

    def copies(self, kind: str | None = None) -> list[Transfer]:
        """Return the entries in which bytes were copied; `kind`: only `h2d` or `d2h`."""
        return [e for e in self.transfers if e.mode == "staged" and kind in (None, e.kind)]

    def nbytes(self, kind: str) -> int:
        """Return how many bytes were copied in one direction, `h2d` or `d2h`."""
        return sum(e.nbytes for e in self.copies(kind))

    def __str__(self) -> str:
        lines = [f"{i + 1:3d}. {entry}" for i, entry in enumerate(self.entries)]
        copied = f"{self.nbytes('h2d')} bytes copied in, {self.nbytes('d2h')} out"
        return "\n".join(
            [*lines, f"{len(self.transfers)} transfers ({copied}), {len(self.waits)} waits"]
        )


@dataclass
class _Budget:
    limits: Mapping[str, int]
    spent: Counter[str] = field(default_factory=Counter)

    def charge(self, transfer: Transfer) -> None:
        if transfer.mode == "aliased" or transfer.kind not in self.limits:
            return
        limit = self.limits[transfer.kind]
        if self.spent[transfer.kind] >= limit:
            name = "waits" if transfer.kind == "wait" else transfer.kind
            raise HostCopyError(transfer, f"{name}={limit}")
        self.spent[transfer.kind] += 1


# What is told of each transfer: budgets, which may forbid it, then ledgers.
_WATCHERS: ContextVar[tuple[Callable[[Transfer], None], ...]] = ContextVar("watchers", default=())


def is_watched() -> bool:
    """Say whether anybody records or limits transfers here; if not, entries need not be made."""
    return bool(_WATCHERS.get())


def record(transfer: Transfer) -> None:
    """Enter a transfer that is about to happen.

    Raises:
        HostCopyError: a budget forbids it; it must not happen then.
    """
    for watcher in _WATCHERS.get():
        watcher(transfer)


@contextmanager
def record_transfers(ledger: Ledger | None = None) -> Iterator[Ledger]:
    """Record every host copy and wait of this thread (or asyncio task) in the block.

    Args:
        ledger: one to go on with; by default a new one.

    Example:
        with npu_iree.record_transfers() as ledger:
            compiled(x)
        print(ledger)
    """
    ledger = Ledger() if ledger is None else ledger
    token = _WATCHERS.set((*_WATCHERS.get(), ledger.entries.append))
    try:
        yield ledger
    finally:
        _WATCHERS.reset(token)


@contextmanager
def copy_budget(
    *, h2d: int | None = None, d2h: int | None = None, waits: int | None = None
) -> Iterator[None]:
    """Allow at most so many host copies (not aliases) and waits in the block, in this thread.

    Args:
        h2d: number of copies to the device; None: any.
        d2h: number of copies from the device; None: any.
        waits: number of times the host may wait for the device; None: any.

    Raises:
        HostCopyError: at the copy or wait that would break the budget, before it happens.
    """
    limits = {"h2d": h2d, "d2h": d2h, "wait": waits}
    budget = _Budget({kind: limit for kind, limit in limits.items() if limit is not None})
    token = _WATCHERS.set((budget.charge, *_WATCHERS.get()))
    try:
        yield
    finally:
        _WATCHERS.reset(token)

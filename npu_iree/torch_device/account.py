"""What holds the device's memory: a count, a peak, a limit, and a table of who holds how much."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowering.errors import shortened
from npu_iree.array import DeviceArray


@dataclass
class Account:
    """The bytes of all handles that tensors hold.

    Attributes:
        allocated: bytes now.
        peak: the most there were.
        limit: the most there may be, or None.
    """

    allocated: int = 0
    peak: int = 0
    limit: int | None = None


ACCOUNT = Account()
# What forgets handles that are kept to be used again.
CACHES: list[Callable[[], None]] = []
_Ref = weakref.ref  # the key of a live handle
_LIVE: dict[_Ref[DeviceArray], tuple[int, str]] = {}


def keep(array: DeviceArray, name: str) -> DeviceArray:
    """Count a handle from now until it goes; what is counted already is not counted again.

    Args:
        array: a handle on memory of its own.
        name: what made it.
    """
    reference = weakref.ref(array, _forget)
    if reference in _LIVE:  # a call may return a handle that it was given
        return array
    nbytes = array.nbytes
    _LIVE[reference] = (nbytes, name)
    ACCOUNT.allocated += nbytes
    if ACCOUNT.allocated > ACCOUNT.peak:
        ACCOUNT.peak = ACCOUNT.allocated
    return array


def _forget(reference: _Ref[DeviceArray]) -> None:
    nbytes, _ = _LIVE.pop(reference)
    ACCOUNT.allocated -= nbytes


def forget() -> None:
    """Let go of all handles that are kept to be used again."""
    for clear in CACHES:
        clear()


def reserve(nbytes: int) -> None:
    """Make sure that so many more bytes may be taken.

    Raises:
        torch.OutOfMemoryError: they may not; nothing has been taken.
    """
    limit = ACCOUNT.limit
    if limit is None or ACCOUNT.allocated + nbytes <= limit:
        return
    forget()
    gc.collect()  # tensors in reference cycles
    if ACCOUNT.allocated + nbytes > limit:
        raise torch.OutOfMemoryError(
            f"npu:0 is out of memory: {nbytes} bytes are needed, {ACCOUNT.allocated} of {limit} "
            f"are held:\n{table()}"
        )


def table(rows: int = 10) -> str:
    """Tell what holds memory: bytes, number of handles, and the op that made them."""
    held: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for nbytes, name in list(_LIVE.values()):
        held[name] += nbytes
        count[name] += 1
    lines = [
        f"{nbytes:>14} bytes in {count[name]:>5} handles made by {name}"
        for name, nbytes in held.most_common()
    ]
    return "\n".join(shortened(lines, rows, "... and by {} others"))

"""What IREE reads parameters from: kept until it has let go of it, on whichever thread it does."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Mapping
from typing import Any

from iree.runtime import _binding as hal

# By their addresses, which are looked at without counting a reference up and down: IREE counts its
# own down meanwhile, and without Python's lock.
_KEPT: dict[int, Any] = {}
_LOOKING = threading.Lock()  # one at a time: another may have freed what is looked at


def parameter_index(memories: Mapping[str, Any]) -> Any:
    """Return IREE's index of parameters.

    IREE's runtime (3.13) drops what `ParameterIndex.add_buffer` was given where it needs it last.
    That may be a thread of its own, when a module that is loaded anew leaves work behind; there, it
    does not take Python's lock. Were it the last to refer to the memory, the process would end. So
    we are, and let go of it at the next full collection of garbage, or the next index.

    Args:
        memories: by name, objects with the buffer protocol that own what they need, and that
            nothing else refers to. Nobody writes to them any more.
    """
    drop_released()
    index = hal.ParameterIndex()
    for name, memory in memories.items():
        _KEPT[id(memory)] = memory
        index.add_buffer(name, memory)
    return index


def drop_released() -> None:
    """Let go of what IREE has let go of."""
    # A collection may begin anywhere, in here, too; and what is let go of may run anybody's code.
    if _LOOKING.acquire(blocking=False):
        try:
            released = [_KEPT.pop(address) for address in list(_KEPT) if _references(address) == 1]
        finally:
            _LOOKING.release()
        released.clear()


def _references(address: int) -> int:
    """Return how many references there are to an object, as CPython counts them."""
    return ctypes.c_ssize_t.from_address(address).value


def _after_collection(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        drop_released()


gc.callbacks.append(_after_collection)

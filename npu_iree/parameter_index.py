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
_LOCK = threading.Lock()


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
    with _LOCK:
        for name, memory in memories.items():
            _KEPT[id(memory)] = memory
            index.add_buffer(name, memory)
    return index


def drop_released() -> None:
    """Let go of what IREE has let go of."""
    if not _LOCK.acquire(blocking=False):  # a collection may begin anywhere, below this, too
        return
    try:
        for address in list(_KEPT):
            references = ctypes.c_ssize_t.from_address(address)  # as CPython's objects begin
            if references.value == 1:
                del _KEPT[address]
    finally:
        _LOCK.release()


def _after_collection(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        drop_released()


gc.callbacks.append(_after_collection)

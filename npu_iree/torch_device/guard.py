"""What PyTorch's C++ asks of the device, also while an error of Python's is on its way.

In a backward pass PyTorch makes the stream of each node's device current, and what was current
again after it. For that it calls a guard that is written in Python, here even while an error goes
by that a hook has raised. CPython takes no result of a call that is made so, and PyTorch takes no
error there: it ends the process. So the guard sets the error aside, and whoever has begun the pass
raises it.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

_FETCH, _RESTORE = ctypes.pythonapi.PyErr_Fetch, ctypes.pythonapi.PyErr_Restore
_FETCH.restype = _RESTORE.restype = None
_RESTORE.argtypes = [ctypes.c_void_p] * 3  # type, value, traceback
_TYPE = torch._C._autograd.DeviceType.PrivateUse1


class _Aside(threading.local):
    """The error of a thread that is set aside."""

    def __init__(self) -> None:
        self.parts = tuple(ctypes.c_void_p() for _ in range(3))
        self.places = tuple(map(ctypes.byref, self.parts))
        self.error: BaseException | None = None


_ASIDE = _Aside()


class DeviceGuard(torch._C._acc.DeviceGuard):
    """The guard of the one device, which has one stream for PyTorch."""

    def type_(self) -> Any:
        """Say what type the device is of; the first call here takes the error, if there is one."""
        _FETCH(*_ASIDE.places)
        if _ASIDE.parts[0].value:
            try:
                _RESTORE(*(part.value for part in _ASIDE.parts))  # which raises it
            except BaseException as error:
                _ASIDE.error = error
        return _TYPE


def take_error() -> BaseException | None:
    """Return the error of this thread that has been set aside since the last time, if any."""
    error, _ASIDE.error = _ASIDE.error, None
    return error

"""The buffers that calls write to: on the device, as the last call that did not fail left them."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from npu_iree.array import DeviceArray
from npu_iree.errors import DeviceError

State = torch.Tensor | DeviceArray


class States:
    """The buffers of a loaded program that calls write to, shared by its entry points.

    A call that was submitted may fail after the next has been: earlier values are kept until later
    ones are known to exist.

    Attributes:
        lock: to be held by a call that reads or writes them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.lock = threading.Lock()
        self._versions: list[Mapping[str, State]] = [tensors]

    def current(self) -> Mapping[str, State]:
        """Return the values that a new call starts from: those of the last that did not fail."""
        while len(self._versions) > 1 and _has_failed(self._versions[-1]):
            self._versions.pop()
        for i in reversed(range(1, len(self._versions))):
            if _exists(self._versions[i]):
                del self._versions[:i]
                break
        return self._versions[-1]

    def advance(self, written: Mapping[str, DeviceArray]) -> None:
        """Let the values be what a call has made of them."""
        self._versions.append({**self._versions[-1], **written})


def _exists(version: Mapping[str, State]) -> bool:
    try:
        return all(v.is_ready() for v in version.values() if isinstance(v, DeviceArray))
    except DeviceError:
        return False


def _has_failed(version: Mapping[str, State]) -> bool:
    try:
        for value in version.values():
            if isinstance(value, DeviceArray):
                value.is_ready()
    except DeviceError:
        return True
    return False

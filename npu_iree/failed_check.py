"""What a call has found wrong with its values: read when somebody waits for the call."""

from __future__ import annotations

import sys
from typing import Any

from lowering.signature import Signature
from npu_iree.device import Device
from npu_iree.errors import BadValueError, DeviceError
from npu_iree.timeline import NOW, Timepoint, Work
from npu_iree.transfers import Transfer, is_watched, record


class FailedCheck:
    """What a call has found of its values (a `Finding`).

    Args:
        device: where it ran.
        view: of the number that says so.
        work: what the call was.
        signature: says what the number means.
    """

    __slots__ = ("_copy", "_device", "_signature", "_view", "_work", "is_at_hand")

    def __init__(self, device: Device, view: Any, work: Work, signature: Signature) -> None:
        self._device = device
        self._view = view
        self._work = work
        self._signature = signature
        self._copy: tuple[Any, Timepoint] | None = None
        self.is_at_hand = device.crossing_mode == "aliased"

    def copy(self, ready: Timepoint) -> None:
        """Have it copied from the device (see `Finding`)."""
        if self._copy is None:
            if is_watched():
                record(Transfer("d2h", "staged", self._view.byte_length, "checks", self._work.name))
            (view,), (point,) = self._device.memory.fetch([self._view], [ready])
            self._copy = view, point

    def error(self) -> DeviceError | None:
        """Read it (see `Finding`)."""
        view = self._view
        if not self.is_at_hand:
            self.copy(NOW)
            assert self._copy is not None
            view, copied = self._copy
            try:
                copied.wait_for_device()
            except DeviceError as error:
                return error
        check = self._signature.failed(int.from_bytes(view.map(), sys.byteorder))
        return None if check is None else BadValueError.of(check, self._work.name, self._work.ops)

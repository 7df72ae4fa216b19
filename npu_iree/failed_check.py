"""What a call has found wrong with its values: read when somebody waits for the call."""

from __future__ import annotations

import sys
from typing import Any

from lowering.signature import Signature
from npu_iree.device import Device
from npu_iree.errors import BadValueError, DeviceError
from npu_iree.timeline import NO_WAIT, Timepoint, Work
from npu_iree.transfers import Transfer, is_watched, record


class FailedCheck:
    """What a call has found of its values (a `Finding`).

    Args:
        device: where it ran.
        view: of the number that says so.
        signature: says what the number means.
    """

    __slots__ = ("_copy", "_device", "_signature", "_view", "is_at_hand")

    def __init__(self, device: Device, view: Any, signature: Signature) -> None:
        self._device = device
        self._view = view
        self._signature = signature
        self._copy: tuple[Any, Timepoint] | None = None
        self.is_at_hand = device.crossing_mode == "aliased"

    def copy(self, ready: Timepoint) -> None:
        """Have it copied from the device (see `Finding`)."""
        if self._copy is None:
            if is_watched():
                record(Transfer("d2h", "staged", self._view.byte_length, "checks", ready.work.name))
            (view,), (point,) = self._device.memory.fetch([self._view], [ready])
            self._copy = view, point

    def error(self, work: Work) -> DeviceError | None:
        """Read it (see `Finding`)."""
        view = self._view
        if not self.is_at_hand:
            self.copy(Timepoint(NO_WAIT, work))
            assert self._copy is not None
            view, copied = self._copy
            try:
                copied.wait_for_device()
            except DeviceError as error:
                return error
        check = self._signature.failed(int.from_bytes(view.map(), sys.byteorder))
        return None if check is None else BadValueError.of(check, work.name, work.ops)

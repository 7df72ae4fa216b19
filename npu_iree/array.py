"""`DeviceArray`: an opaque handle on device memory whose bytes exist from a point in time on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from npu_iree.device import Device
    from npu_iree.timeline import Timepoint


class DeviceArray:
    """A tensor on a device, as a promise: shape and dtype are known now, the bytes at `ready`.

    Handles are made by `Device.put` and by calls of executables, and are handed on as they are;
    the device itself waits for `ready`. Only `to_host` and `wait` block.

    Attributes:
        device: the device whose memory it is.
        shape: sizes, known without waiting.
        dtype: torch dtype.
        ready: the point in time at which the bytes exist.
        hal_view: what IREE has the memory as; who gives it to the device has that wait for `ready`.
    """

    __slots__ = ("__weakref__", "_of", "device", "dtype", "hal_view", "ready", "shape")
    _of: DeviceArray  # of the same bytes under another shape: who is counted for them

    def __init__(
        self,
        device: Device,
        view: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        ready: Timepoint,
    ) -> None:
        self.device = device
        self.shape = shape
        self.dtype = dtype
        self.ready = ready
        self.hal_view = view

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.hal_view.byte_length)

    def is_ready(self) -> bool:
        """Say whether the bytes exist, without waiting.

        Raises:
            DeviceError: the work that makes them failed.
        """
        return self.ready.is_reached()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the bytes exist; `timeout_s` in seconds, None: for ever.

        Raises:
            DeviceError: the work that makes them failed.
            DeviceTimeoutError: they do not exist yet.
        """
        self.ready.wait(timeout_s)

    def to_host(self, timeout_s: float | None = None) -> torch.Tensor:
        """Wait, and return the bytes as a CPU tensor of this shape and dtype.

        To fetch several handles behind one wait, use `Device.gather`.

        Raises:
            DeviceError: the work that makes them failed.
            DeviceTimeoutError: they do not exist yet.
            HostCopyError: a `copy_budget` forbids it.
        """
        (tensor,) = self.device.gather([self], timeout_s=timeout_s)
        return tensor

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a DeviceArray has no truth value: its bytes may not exist yet. "
            "Use is_ready() to ask, or to_host() to wait for them."
        )

    def __repr__(self) -> str:
        state = "ready" if self.ready.reached else "promised"
        dtype = str(self.dtype).removeprefix("torch.")
        target = self.device.target.name
        return f"<DeviceArray {list(self.shape)} {dtype} on {target}, {state}>"


class KeptArray(DeviceArray):
    """A handle on memory that the device goes on to use: the host gets a copy of the bytes."""

    __slots__ = ()

    @classmethod
    def of(cls, array: DeviceArray) -> KeptArray:
        """Make one of another handle."""
        return cls(array.device, array.hal_view, array.shape, array.dtype, array.ready)

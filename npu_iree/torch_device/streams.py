"""Streams and events: an order among calls, beyond the one that their data gives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import torch

from npu_iree.errors import DeviceError, NpuIreeError
from npu_iree.timeline import Timepoint
from npu_iree.torch_device.current import NAME, Which, index_of
from npu_iree.torch_device.current import device as _device


class Event:
    """The point at which everything that had been submitted when it was recorded has ended."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        """Make one that is not recorded yet, and so is reached.

        Args:
            enable_timing: False.
            blocking: whether waiting for it gives the CPU away, which it always does.
            interprocess: False.

        Raises:
            NpuIreeError: the device's events measure no time, and are of one process.
        """
        if enable_timing:
            raise _no_time()
        if interprocess:
            raise NpuIreeError("events of npu are of one process")
        self._points: tuple[Timepoint, ...] = ()

    def __repr__(self) -> str:
        return f"<torch.npu.Event of {len(self._points)} calls>"

    def record(self, stream: Stream | None = None) -> None:
        """Let the event be the end of what has been submitted so far."""
        self._points = (*_device().in_flight, *(stream or current_stream()).points())

    def query(self) -> bool:
        """Say whether all of it has ended, without waiting.

        Raises:
            DeviceError: some of it has failed.
        """
        return all(point.is_reached() for point in self._points)

    def synchronize(self) -> None:
        """Wait until all of it has ended, well or not."""
        for point in self._points:
            with contextlib.suppress(DeviceError):
                point.wait()

    def elapsed_time(self, end: Event) -> float:
        """Refuse.

        Raises:
            NpuIreeError: the device's events measure no time.
        """
        raise _no_time()

    def wait(self, stream: Stream | None = None) -> None:
        """Let what is submitted to a stream from now on start after the event."""
        (stream or current_stream()).wait_event(self)


def _no_time() -> NpuIreeError:
    return NpuIreeError("events of npu measure no time; npu_iree.record_timeline() does")


class Stream:
    """Calls submitted while it is current start after the events that it was told to wait for.

    The device runs what does not depend on each other at the same time, on any stream; data alone
    orders calls, and events where that is not enough. In a `with` block, it is current.
    """

    def __init__(self, device: Which = None, priority: int = 0, **kwargs: Any) -> None:
        self.device_index = index_of(device)
        self._points: tuple[Timepoint, ...] = ()

    def __repr__(self) -> str:
        kind = "default stream" if self is _DEFAULT else f"stream {id(self):#x}"
        return f"<torch.npu.Stream on {self.device}: {kind}>"

    @property
    def device(self) -> torch.device:
        """The device that it is one of."""
        return torch.device(NAME, self.device_index)

    def __enter__(self) -> Stream:
        _before().append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(_before().pop())

    def points(self) -> Sequence[Timepoint]:
        """Return what work that is submitted now has to wait for: what has not ended yet."""
        self._points = tuple(point for point in self._points if not _has_ended(point))
        return self._points

    def wait_event(self, event: Event) -> None:
        """Let what is submitted here from now on start after an event."""
        self._points = (*self.points(), *event._points)
        _device().order = _order_of_thread

    def wait_stream(self, stream: Stream) -> None:
        """Let what is submitted here from now on start after what has been submitted there."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event (a new one if none is given) and return it."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Say whether everything that was submitted has ended."""
        return self.record_event().query()

    def synchronize(self) -> None:
        """Wait until everything that was submitted has ended."""
        self.record_event().synchronize()


def _has_ended(point: Timepoint) -> bool:
    """Say whether work has ended, well or not: what only comes after it does not fail with it."""
    try:
        return point.is_reached()
    except DeviceError:
        return True


_DEFAULT = Stream()
_CURRENT = threading.local()


def current_stream(device: Which = None) -> Stream:
    """Return the stream that calls of this thread are submitted to."""
    index_of(device)
    return getattr(_CURRENT, "stream", _DEFAULT)


def _order_of_thread() -> Sequence[Timepoint]:
    return current_stream().points()


def default_stream(device: Which = None) -> Stream:
    """Return the stream that is current where no other one is."""
    index_of(device)
    return _DEFAULT


def set_stream(stream: Stream | None) -> None:
    """Submit the calls of this thread to a stream; None: to the one that is current.

    Raises:
        TypeError: it is no stream of npu.
    """
    if stream is None:
        return
    if not isinstance(stream, Stream):
        raise TypeError(f"set_stream takes a torch.npu.Stream, not {type(stream)}")
    _CURRENT.stream = stream


def stream(stream: Stream | None) -> Stream:
    """Return what submits the calls of a `with` block to a stream; None: to the current one."""
    return stream or current_stream()


def _before() -> list[Stream]:
    """Return what was current before the blocks that this thread is in."""
    stack: list[Stream] = _CURRENT.__dict__.setdefault("before", [])
    return stack

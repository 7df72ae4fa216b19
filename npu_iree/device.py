"""A HAL device: opened once a process and target; puts, gathers, and bounds the work in flight."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from iree.runtime import _binding as hal
from iree.runtime import query_available_drivers

from lowering.dtypes import DTYPE_NAMES
from lowering.suggest import there_are
from npu_iree.arenas import Arenas
from npu_iree.array import DeviceArray, KeptArray
from npu_iree.blocks import Blocks
from npu_iree.errors import IN_A_CHILD, DeviceError, NpuIreeError, TargetError
from npu_iree.host_memory import check_memory, dense_copy
from npu_iree.memory import MEMORIES, Memory
from npu_iree.targets import Target, find_target
from npu_iree.timeline import NOW, Gate, Timepoint, Work, joined, wait_all
from npu_iree.transfers import Transfer, is_watched, record
from npu_iree.untraced import untraced
from npu_iree.versions import check_versions

# What IREE's tools are to be told, too, to run as we do.
DRIVER_FLAGS = {
    "local-task": (
        # As much memory of its own as a worker may be asked for
        # (`lowering.stages.code.multiply_tiles`). IREE's default is the size of the second cache,
        # which not every system tells.
        "--task_worker_local_memory=1048576",
        # So long a worker looks for more before it sleeps: less than it takes to wake. Of a chain
        # of small products, a call takes 0.84 of the time, of T5 and Mamba 0.98; with 50 us, the
        # workers keep their CPUs from the thread that waits for the result.
        "--task_worker_spin_us=10",
    ),
}


class Device:
    """An open device of a target.

    Thread-safe: any thread may put, invoke and gather.

    Attributes:
        target: what it is.
        hal: the HAL device.
        inline: the one that works on the calling thread, or None.
        memory: its border; `memory.count` is what the device itself has seen cross.
        arenas: what it lends to calls for what they compute on the way.
        blocks: what it lends to calls for their results.
        order: gives the points in time after which new work of the calling thread starts; None if
            nobody has asked for such an order.
    """

    def __init__(self, target: Target) -> None:
        check_versions("torch", "iree-base-runtime")
        if target.inline_driver and target.memory != "unified":
            raise TargetError(
                f"target {target.name!r} has memory of its own, which its inline_driver "
                f"({target.inline_driver}) cannot read: leave that out"
            )
        self.target = target
        self.hal = self._open(target.driver)
        self.inline = self._open(target.inline_driver) if target.inline_driver else None
        self.memory: Memory = MEMORIES[target.memory](self.hal)
        self.arenas = Arenas(self.memory.reserve)
        self.blocks = Blocks(self.memory.reserve_pages)
        self._in_flight: deque[tuple[Timepoint, int]] = deque()
        self._in_flight_bytes = 0
        self._lock = threading.Lock()
        self._held: tuple[Gate, ...] = ()
        self._is_of_parent = False
        self.order: Callable[[], Sequence[Timepoint]] | None = None

    def _open(self, uri: str) -> Any:
        name, told = uri.partition("://")[0], f"cannot open a device for {self.target.name!r}"
        if name not in (known := query_available_drivers()):
            raise TargetError(f"{told}: IREE has no driver {name!r}.{there_are(name, known)}")
        try:
            return _driver(name).create_device_by_uri(uri)
        except (RuntimeError, ValueError) as error:
            raise TargetError(f"{told} (driver {uri}): {error}") from error

    @property
    def crossing_mode(self) -> Literal["staged", "aliased"]:
        """How dense, aligned memory crosses: by alias where memory is unified."""
        return "aliased" if self.target.memory == "unified" else "staged"

    @untraced
    def put(self, tensor: torch.Tensor, *, after: Timepoint | None = None) -> DeviceArray:
        """Give the device a tensor; returns at once.

        The bytes are taken now: what happens to `tensor` later does not reach the handle.

        Args:
            tensor: a dense CPU tensor of any strides.
            after: the copy lands after this point in time (by default, as soon as it can).

        Raises:
            ArgumentError: the tensor is nested, sparse, or a subclass that only holds others, or
                its storage is too small for it.
            NpuIreeError: the tensor is not on the CPU, or no device buffer holds its dtype.
            HostCopyError: a `copy_budget` forbids the copy.
        """
        if tensor.device.type != "cpu" or tensor.dtype not in DTYPE_NAMES:
            raise NpuIreeError(
                f"cannot put a tensor of {tensor.dtype} on {tensor.device} to {self.target.name}"
            )
        check_memory(tensor, "the tensor")
        dense = dense_copy(tensor)
        if is_watched():
            record(Transfer("h2d", "staged", tensor.nbytes, "tensor", "put"))
        view, ready = self.memory.put(dense, self.start_point(after), "tensor")
        return DeviceArray(self, view, tuple(tensor.shape), tensor.dtype, ready)

    @untraced
    def gather(
        self, arrays: Sequence[DeviceArray], *, timeout_s: float | None = None
    ) -> list[torch.Tensor]:
        """Bring several handles to the host in one batch, behind one wait.

        Args:
            arrays: handles of this device.
            timeout_s: seconds to wait at most; None: for ever.

        Returns:
            Contiguous CPU tensors; where memory is unified, they are the device's own bytes, but
            for those of a `KeptArray`.

        Raises:
            DeviceError: the work that makes one of them failed; names the first that did.
            DeviceTimeoutError: they do not exist yet.
            HostCopyError: a `copy_budget` forbids it.
        """
        if is_watched():
            mode = self.crossing_mode
            record(Transfer("wait", "wait", 0, f"{len(arrays)} handles", "to_host"))
            for array in arrays:
                how = "staged" if isinstance(array, KeptArray) else mode
                record(Transfer("d2h", how, array.nbytes, repr(array), "to_host"))
        tensors = self.fetch(arrays, timeout_s)
        is_unified = self.target.memory == "unified"
        is_kept = [is_unified and isinstance(array, KeptArray) for array in arrays]
        return [t.clone() if kept else t for t, kept in zip(tensors, is_kept, strict=True)]

    def fetch(
        self, arrays: Sequence[DeviceArray], timeout_s: float | None = None
    ) -> list[torch.Tensor]:
        """Do what `gather` does, for a caller that has entered it into the ledger."""
        if not arrays:
            return []
        self.refuse_child()
        views, points = self.memory.fetch([a.hal_view for a in arrays], [a.ready for a in arrays])
        for array in arrays:
            array.ready.copy_finding()
        wait_all(points, timeout_s)
        for point in self.order() if self.order is not None else ():
            with contextlib.suppress(DeviceError):
                point.wait(timeout_s)
        return [self.as_tensor(v, a.dtype) for v, a in zip(views, arrays, strict=True)]

    def as_tensor(self, view: object, dtype: torch.dtype) -> torch.Tensor:
        """Return the bytes of a view, which the host may read, as a tensor of this dtype."""
        tensor: torch.Tensor = torch._C._from_dlpack(self.hal.create_dlpack_capsule(view, 1, 0))
        return tensor if tensor.dtype is dtype else tensor.view(dtype)

    def track(self, point: Timepoint, nbytes: int) -> None:
        """Count submitted work; waits for the oldest if too much is in flight."""
        limit, limit_bytes = self.target.max_in_flight, self.target.max_in_flight_bytes
        with self._lock:
            self._in_flight.append((point, nbytes))
            self._in_flight_bytes += nbytes
            if len(self._in_flight) * 4 < limit and self._in_flight_bytes * 4 < limit_bytes:
                return  # asking the oldest each time costs more than to ask many now and then
            self._forget_ended()
            full = len(self._in_flight) > limit or self._in_flight_bytes > limit_bytes
            oldest = self._in_flight[0][0] if full and len(self._in_flight) > 1 else None
        if oldest is not None:
            if is_watched():
                record(Transfer("wait", "wait", 0, oldest.work.name, "", reason="queue is full"))
            with contextlib.suppress(DeviceError):  # whoever waits for that work is told
                oldest.wait()

    @property
    def in_flight(self) -> tuple[Timepoint, ...]:
        """The submitted calls that may not have ended, oldest first."""
        with self._lock:
            self._forget_ended()
            return tuple(point for point, _ in self._in_flight)

    def _forget_ended(self) -> None:
        while self._in_flight:
            point, nbytes = self._in_flight[0]
            try:
                if not point.is_reached():
                    return
            except DeviceError:
                pass
            self._in_flight.popleft()
            self._in_flight_bytes -= nbytes

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until everything that was submitted has ended, well or not."""
        for point in self.in_flight:
            with contextlib.suppress(DeviceError):
                point.wait(timeout_s)

    def gate(self, name: str = "gate") -> Gate:
        """Return a gate: pass its `point` as `after`, and the work stands still until it opens."""
        return Gate(self.hal, name)

    @contextlib.contextmanager
    def hold(self, name: str = "hold") -> Iterator[Gate]:
        """Keep what is put and called in the block from starting until the gate opens.

        For tests of what is submitted before a call waits; the end of the block opens the gate.
        """
        gate = self.gate(name)
        self._held = (*self._held, gate)
        try:
            yield gate
        finally:
            self._held = tuple(g for g in self._held if g is not gate)
            gate.open()

    @property
    def is_free(self) -> bool:
        """Whether new work may start at once: nobody holds it, and nobody has ordered it."""
        is_ordered = self.order is not None and self.order()
        return not (self._held or is_ordered or self._is_of_parent)

    def start_point(self, after: Timepoint | None = None) -> Timepoint:
        """Return the point from which new work may start: now, unless it is held or ordered."""
        self.refuse_child()
        points = [g.point for g in self._held]
        points += [after] if after is not None else []
        points += self.order() if self.order is not None else ()
        return NOW if not points else points[0] if len(points) == 1 else _all_of(points)

    def leave_to_parent(self) -> None:
        """Take no more work: this process was forked, and the driver's threads were not.

        What waited for them would wait for ever, and wake waits of the parent.
        """
        self._is_of_parent = True

    def refuse_child(self) -> None:
        """Raise in a forked child; before a lock is taken that a thread of the parent may have had.

        Raises:
            NpuIreeError: the device runs in the parent alone.
        """
        if self._is_of_parent:
            raise NpuIreeError(
                f"the device of {self.target.name}, opened before this process was forked, runs in "
                f"the parent alone: {IN_A_CHILD}"
            )

    def __repr__(self) -> str:
        return f"<Device of {self.target.name}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self} is of this process, with all handles and loaded programs on it: another one "
            "opens its own, and is given tensors of the CPU and the paths of artifacts"
        )


def _all_of(points: Sequence[Timepoint]) -> Timepoint:
    fence, ahead = joined(points)
    return Timepoint(fence, Work("start"), ahead)


_LOOKS = 3  # in a row: a thread may sleep for a moment while it waits for a lock
_DEVICES: dict[str, Device] = {}
_DRIVERS: dict[str, Any] = {}
_OPENING = threading.Lock()


def _driver(name: str) -> Any:
    """Return the process's driver of a name: its devices share its threads."""
    if name not in _DRIVERS:
        hal.parse_flags(*DRIVER_FLAGS.get(name, ()))
        driver = _DRIVERS[name] = hal.create_hal_driver(name)
        _keep_for_ever(driver)
    return _DRIVERS[name]


def _keep_for_ever(value: Any) -> None:
    """Let a HAL object never be destroyed.

    Results that live in any module may be freed after this one at the interpreter's end, and need
    the device then; and in a forked child there are no threads that could end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def open_device(target: Target | str = "npu-local") -> Device:
    """Return the process's device for a target, opening it at the first call.

    Raises:
        TargetError: there is no such target, its driver finds no device here, or the device of
            another target with this name is open, one that is not only compiled for otherwise.
    """
    target = find_target(target) if isinstance(target, str) else target
    with _OPENING:
        if target.name not in _DEVICES:
            device = _DEVICES[target.name] = Device(target)
            _keep_for_ever(device.hal)
            _keep_for_ever(device.inline)
        device = _DEVICES[target.name]
    if device.target != replace(target, compile=device.target.compile):
        raise TargetError(f"a device of another target that is named {target.name!r} is open")
    return device


def _after_fork() -> None:
    """Begin without devices in the child of a fork."""
    for device in _DEVICES.values():
        device.leave_to_parent()
    _DEVICES.clear()
    _DRIVERS.clear()
    _OPENING.release()


os.register_at_fork(
    before=_OPENING.acquire, after_in_parent=_OPENING.release, after_in_child=_after_fork
)


@atexit.register
def _end() -> None:
    """Let the devices finish before the interpreter goes: their work reads host memory.

    What the user still holds in globals (compiled models, handles) outlives the module teardown,
    which nanobind would report as pages of leaks; it is freed by the process's end.
    """
    for device in _DEVICES.values():
        device.synchronize()
    if _DEVICES:
        _let_threads_rest()
    hal.disable_leak_checker()


def _let_threads_rest(limit_s: float = 1.0) -> None:
    """Wait until the driver's threads sleep.

    Work has ended for whoever waits for it a moment before a thread of the driver lets go of the
    tensors that it read. For that it takes the interpreter's lock; once the interpreter is ending,
    Python ends such a thread instead, and C++ the process ("terminate called without an active
    exception").
    """
    deadline, looks = time.monotonic() + limit_s, 0
    while looks < _LOOKS and time.monotonic() < deadline:
        looks = looks + 1 if _do_threads_sleep() else 0
        time.sleep(0.001)  # lets go of the interpreter's lock, too


def _do_threads_sleep() -> bool:
    with contextlib.suppress(OSError):  # no Linux, or a thread that ends
        for stat in Path("/proc/self/task").glob("*/stat"):
            name, _, fields = stat.read_text().partition("(")[2].rpartition(")")
            if name.startswith("iree-") and fields.split()[0] != "S":
                return False
    return True

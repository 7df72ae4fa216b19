"""How bytes get onto a device and back: in place where memory is unified, else by staged copies."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from iree.runtime import _binding as hal

from npu_iree.frozen import bytes_at
from npu_iree.timeline import Timepoint, Work, joined, new_fence, submitted

_LARGE_PAGE = 2 << 20  # bytes: a page table's, on x86-64 and AArch64
_DEVICE_LOCAL = int(hal.MemoryType.DEVICE_LOCAL)
_STAGING = int(hal.MemoryType.HOST_LOCAL | hal.MemoryType.DEVICE_VISIBLE)
_DEVICE_USAGE = int(hal.BufferUsage.DEFAULT)
_STAGING_USAGE = int(hal.BufferUsage.TRANSFER | hal.BufferUsage.MAPPING)

HAL_TYPES = {
    torch.float16: hal.HalElementType.FLOAT_16,
    torch.bfloat16: hal.HalElementType.BFLOAT_16,
    torch.float32: hal.HalElementType.FLOAT_32,
    torch.float64: hal.HalElementType.FLOAT_64,
    torch.int8: hal.HalElementType.SINT_8,
    torch.int16: hal.HalElementType.SINT_16,
    torch.int32: hal.HalElementType.SINT_32,
    torch.int64: hal.HalElementType.SINT_64,
    torch.uint8: hal.HalElementType.UINT_8,
    torch.bool: hal.HalElementType.BOOL_8,
    torch.complex64: hal.HalElementType.COMPLEX_64,
    torch.complex128: hal.HalElementType.COMPLEX_128,
}


@dataclass
class TransferCount:
    """What a device itself has seen cross its border, independent of any ledger.

    Attributes:
        h2d: copies to the device.
        d2h: copies from the device.
        h2d_bytes: their bytes.
        d2h_bytes: their bytes.
    """

    h2d: int = 0
    d2h: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0


class Memory(Protocol):
    """The border of one device's memory; `tensor` is always dense, in the order it is stored."""

    count: TransferCount

    def put(
        self, tensor: torch.Tensor, after: Timepoint, name: str, is_given: bool = False
    ) -> tuple[Any, Timepoint]:
        """Return a buffer view of the tensor's bytes, and when they are there.

        If it is given, the device may write to them.
        """

    def fetch(
        self, views: Sequence[Any], ready: Sequence[Timepoint]
    ) -> tuple[Sequence[Any], Sequence[Timepoint]]:
        """Return views that the host may read, and from when on."""

    def parameter(self, tensor: torch.Tensor) -> Any:
        """Return bytes for IREE's parameter provider; they own what they need."""

    def reserve(self, nbytes: int) -> tuple[Any, Callable[[], None]]:
        """Return a buffer that stays, and what gives its pages back to the system meanwhile.

        Raises:
            OSError, MemoryError, RuntimeError: there is not so much memory.
        """

    def reserve_pages(self, nbytes: int) -> Pages | None:
        """Return memory for results; None: the device's allocator has better.

        Raises:
            OSError, MemoryError: there is not so much memory.
        """


class Pages:
    """Memory of this process: large pages where the system has them, backed when written to.

    Attributes:
        nbytes: how much.
    """

    def __init__(self, device: Any, nbytes: int) -> None:
        self.nbytes = nbytes
        self._device = device
        whole = -(-nbytes // _LARGE_PAGE) * _LARGE_PAGE + _LARGE_PAGE
        is_private = hasattr(mmap, "MAP_PRIVATE")
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if is_private else {}
        self._map = mmap.mmap(-1, whole, **flags)
        start = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._address = start + -start % _LARGE_PAGE
        self.advise("MADV_HUGEPAGE")

    def buffer(self, owner: object) -> Any:
        """Return a HAL buffer of all of it, which keeps `owner` alive, and so do its views."""
        memory = torch.frombuffer(bytes_at(self._address, self.nbytes, owner), dtype=torch.uint8)
        # From IREE's `import_host_allocation`, views would not keep it alive.
        return self._device.from_dlpack_capsule(torch._C._to_dlpack(memory)).get_buffer()

    def release(self) -> None:
        """Give the pages back to the system; what is written later gets new ones."""
        self.advise("MADV_DONTNEED")

    def advise(self, advice: str) -> None:
        """Tell the system what it is for, if it can be told, and knows of such advice."""
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without large pages
                self._map.madvise(getattr(mmap, advice))


class UnifiedMemory:
    """Host memory is device memory: importing and exporting hand over the same bytes."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.count = TransferCount()

    def put(
        self, tensor: torch.Tensor, after: Timepoint, name: str, is_given: bool = False
    ) -> tuple[Any, Timepoint]:
        """Import the tensor's memory in place; it is kept alive as long as the view."""
        if tensor.numel() == 0:  # its strides may be anything, and its memory none at all
            one = torch.empty(1, dtype=tensor.dtype, device="cpu")
            tensor = one[:0].reshape(tensor.shape)
        elif is_given:  # what comes by DLPack may not be filled, or copied to
            memory = self._device.allocator.import_host_allocation(
                _bytes_of(tensor), _STAGING, _DEVICE_USAGE | _STAGING_USAGE
            )
            element = int(HAL_TYPES[tensor.dtype])
            return hal.HalBufferView(memory, tensor.shape, element), after
        return self._device.from_dlpack_capsule(torch._C._to_dlpack(tensor)), after

    def fetch(
        self, views: Sequence[Any], ready: Sequence[Timepoint]
    ) -> tuple[Sequence[Any], Sequence[Timepoint]]:
        """Return the views themselves."""
        return views, ready

    def parameter(self, tensor: torch.Tensor) -> Any:
        """Return the tensor's own memory."""
        return _bytes_of(tensor)

    def reserve(self, nbytes: int) -> tuple[Any, Callable[[], None]]:
        """Return memory of this process that no child has."""
        pages = Pages(self._device, nbytes)
        pages.advise("MADV_DONTFORK")  # what is shared loses its large pages
        return pages.buffer(pages), pages.release

    def reserve_pages(self, nbytes: int) -> Pages:
        """Return memory of this process."""
        return Pages(self._device, nbytes)


class DiscreteMemory:
    """Device memory that the host cannot map: every crossing is a queued copy through staging."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._allocator = device.allocator
        self.count = TransferCount()

    def put(
        self, tensor: torch.Tensor, after: Timepoint, name: str, is_given: bool = False
    ) -> tuple[Any, Timepoint]:
        """Copy the tensor to staging now, and queue its copy to the device."""
        element = int(HAL_TYPES[tensor.dtype])
        buffer = self._allocator.allocate_buffer(_DEVICE_LOCAL, _DEVICE_USAGE, tensor.nbytes)
        view = hal.HalBufferView(buffer, tensor.shape, element)
        if tensor.nbytes == 0:
            return view, after
        self.count.h2d += 1
        self.count.h2d_bytes += tensor.nbytes
        staging = self._staging(tensor.nbytes)
        self._as_tensor(staging, tensor.nbytes).copy_(tensor.reshape(-1).view(torch.uint8))
        fence, ahead = joined([after])
        signal = new_fence(self._device)
        self._device.queue_copy(staging, buffer, fence, signal)
        return view, submitted(Timepoint(signal, Work(f"put {name}"), ahead))

    def fetch(
        self, views: Sequence[Any], ready: Sequence[Timepoint]
    ) -> tuple[Sequence[Any], Sequence[Timepoint]]:
        """Queue the copies of all views to staging."""
        pairs = [self._fetch(view, point) for view, point in zip(views, ready, strict=True)]
        return [view for view, _ in pairs], [point for _, point in pairs]

    def _fetch(self, view: Any, ready: Timepoint) -> tuple[Any, Timepoint]:
        if view.byte_length == 0:
            return view, ready
        source = view.get_buffer()
        nbytes = source.byte_length()  # more than the view's, if that is the beginning of others
        self.count.d2h += 1
        self.count.d2h_bytes += nbytes
        staging = self._staging(nbytes)
        fence, ahead = joined([ready])
        signal = new_fence(self._device)
        self._device.queue_copy(source, staging, fence, signal)
        host_view = hal.HalBufferView(staging, view.shape, int(view.element_type))
        return host_view, submitted(Timepoint(signal, Work("get"), ahead))

    def parameter(self, tensor: torch.Tensor) -> Any:
        """Return a copy: IREE's loader takes it over from there."""
        self.count.h2d += 1
        self.count.h2d_bytes += tensor.nbytes
        return _bytes_of(tensor.clone())

    def reserve(self, nbytes: int) -> tuple[Any, Callable[[], None]]:
        """Return memory of the device, which is freed with its last handle."""
        buffer = self._allocator.allocate_buffer(_DEVICE_LOCAL, _DEVICE_USAGE, nbytes)
        return buffer, lambda: None

    def reserve_pages(self, nbytes: int) -> None:
        """Leave it to the device."""

    def _staging(self, nbytes: int) -> Any:
        return self._allocator.allocate_buffer(_STAGING, _STAGING_USAGE, nbytes)

    def _as_tensor(self, staging: Any, nbytes: int) -> torch.Tensor:
        view = hal.HalBufferView(staging, [nbytes], int(hal.HalElementType.UINT_8))
        return torch.utils.dlpack.from_dlpack(self._device.create_dlpack_capsule(view, 1, 0))


def _bytes_of(tensor: torch.Tensor) -> Any:
    return bytes_at(tensor.data_ptr(), tensor.nbytes, owner=tensor)


MEMORIES: dict[str, type[UnifiedMemory] | type[DiscreteMemory]] = {
    "unified": UnifiedMemory,
    "discrete": DiscreteMemory,
}

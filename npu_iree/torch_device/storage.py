"""Tensors on "npu": each storage holds one handle; tensors that share the storage share it.

The bytes behind a handle never change once they are made. Writing to a tensor gives its storage
another handle, which every view of it then sees; work that was submitted before keeps the old one.
So nothing has to wait, two storages may hold one handle, and a clone costs nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from iree.runtime import _binding as hal
from torch._prims_common import compute_required_storage_length

from npu_iree.array import DeviceArray
from npu_iree.device import Device
from npu_iree.memory import HAL_TYPES
from npu_iree.timeline import NOW, Timepoint, joined, new_fence, submitted
from npu_iree.torch_device import account
from npu_iree.torch_device.current import device
from npu_iree.torch_device.donations import Donation
from npu_iree.transfers import Transfer, is_watched, record

aten = torch.ops.aten
_new = torch._C._acc.create_empty_tensor
_set = aten.set_.source_Storage_storage_offset
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_DEVICE_LOCAL = int(hal.MemoryType.DEVICE_LOCAL)
_USAGE = int(hal.BufferUsage.DEFAULT)
# What the device has memory as whose elements it cannot compute with, by their size in bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHANGING = threading.RLock()  # what a storage holds depends on what it held


def new_tensor(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    handle: DeviceArray | None = None,
) -> torch.Tensor:
    """Make a tensor with a storage of its own.

    Args:
        shape: its sizes.
        strides: its strides.
        dtype: its dtype.
        handle: its bytes, dense, in the order of the strides; None: whatever is in memory.
    """
    tensor = _new(shape, dtype)  # type: ignore[arg-type]
    storage = tensor.untyped_storage()
    storage.npu_handle = handle  # type: ignore[attr-defined]
    _set.redispatch(_META, tensor, storage, 0, shape, strides)
    return tensor


def blank_like(tensor: torch.Tensor, device: torch.types.Device) -> torch.Tensor:
    """Return a tensor on another device that lies in memory as this one, with nothing in it."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def handle_of(tensor: torch.Tensor) -> DeviceArray:
    """Return the handle of a tensor's storage: all of its bytes."""
    storage: Any = tensor.untyped_storage()
    handle: DeviceArray | None = getattr(storage, "npu_handle", None)
    if handle is None:
        with _CHANGING:
            handle = held_by(storage)
            if handle is None:
                handle = storage.npu_handle = allocate(storage.nbytes())
    return handle


def is_lazy(value: Any) -> bool:
    """Say whether a value is a tensor that is conjugated, or negative, only when it is read."""
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())


def held_by(storage: Any) -> DeviceArray | None:
    """Return the handle of a storage, or None if nothing has been written to it.

    Raises:
        DonatedTensorError: a call has taken its bytes over.
    """
    handle: DeviceArray | None = getattr(storage, "npu_handle", None)
    if handle is None and (donation := getattr(storage, "npu_donation", None)) is not None:
        raise donation.error()
    if handle is None:
        with _CHANGING:
            if (new := getattr(storage, "npu_unread", None)) is not None:
                storage.npu_handle, storage.npu_unread = new, None
            handle = getattr(storage, "npu_handle", None)
    return handle


def set_handle(tensor: torch.Tensor, handle: DeviceArray) -> None:
    """Give a tensor's storage other bytes; `handle` is dense and holds all of them.

    Raises:
        DonatedTensorError: a call has taken its bytes over.
    """
    storage: Any = tensor.untyped_storage()
    with _CHANGING:
        if getattr(storage, "npu_handle", None) is None:
            held_by(storage)
        storage.npu_handle = handle


def give_away(tensor: torch.Tensor, donation: Donation) -> None:
    """Let a tensor's storage hold nothing any more; whoever uses it is told."""
    storage: Any = tensor.untyped_storage()
    with _CHANGING:
        storage.npu_handle, storage.npu_unread, storage.npu_donation = None, None, donation


def set_unread(tensor: torch.Tensor, handle: DeviceArray) -> None:
    """Remember that nobody else holds the bytes that a storage has just got, until they are read.

    What reads them may share them: a clone does, and so does a result that is equal.
    """
    storage: Any = tensor.untyped_storage()
    with _CHANGING:
        storage.npu_handle, storage.npu_unread = None, handle


def unread(tensor: torch.Tensor, order: tuple[int, ...]) -> DeviceArray | None:
    """Return the bytes of a tensor in a memory order, if nobody has ever read them, else None."""
    storage: Any = tensor.untyped_storage()
    handle: DeviceArray | None = getattr(storage, "npu_unread", None)
    shape = tuple(tensor.shape)
    if handle is None or not whole(tensor) or dense_order(shape, tensor.stride()) != order:
        return None
    return shaped(handle, tuple(shape[d] for d in order), tensor.dtype)


def copied(array: DeviceArray) -> DeviceArray:
    """Return the same bytes in memory that nobody else holds; the device copies them."""
    if not array.nbytes:
        return array
    target, source = array.device, array.hal_view.get_buffer()
    nbytes = source.byte_length()  # more than the array's, if that is the beginning of others
    account.reserve(nbytes)
    buffer = target.hal.allocator.allocate_buffer(_DEVICE_LOCAL, _USAGE, nbytes)
    view = hal.HalBufferView(buffer, array.shape, _element(array.dtype))
    fence, ahead = joined([array.ready, target.start_point()])
    signal = new_fence(target.hal)
    target.hal.queue_copy(source, buffer, fence, signal)
    ready = submitted(Timepoint(signal, array.ready.work, ahead))
    target.track(ready, nbytes)
    return DeviceArray(target, view, array.shape, array.dtype, ready)


def whole(tensor: torch.Tensor) -> bool:
    """Say whether a dense tensor is all that its storage holds."""
    return tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()


@lru_cache(maxsize=1 << 14)
def dense_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the dimensions from slowest to fastest, or None if there are gaps or overlaps."""
    natural = tuple(range(len(shape)))
    if 0 in shape:
        return natural
    for order in (natural, tuple(sorted(natural, key=lambda d: (-strides[d], -shape[d])))):
        expected = 1
        for d in reversed(order):
            if shape[d] != 1 and strides[d] != expected:
                break
            expected *= shape[d]
        else:
            return order
    return None


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor in a memory order."""
    strides, expected = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = expected
        expected *= max(1, shape[d])
    return tuple(strides)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return dense_strides(shape, range(len(shape)))


def shaped(array: DeviceArray, shape: tuple[int, ...], dtype: torch.dtype) -> DeviceArray:
    """Return the same bytes under another shape and dtype."""
    if array.shape == shape and array.dtype is dtype:
        return array
    view = hal.HalBufferView(array.hal_view.get_buffer(), shape, _element(dtype))
    result = DeviceArray(array.device, view, shape, dtype, array.ready)
    result._of = getattr(array, "_of", array)
    return result


def _element(dtype: torch.dtype) -> int:
    return int(HAL_TYPES[dtype if dtype in HAL_TYPES else _BITS[dtype.itemsize]])


def allocate(nbytes: int) -> DeviceArray:
    """Return memory with whatever is in it.

    Raises:
        torch.OutOfMemoryError: the device's memory would be exceeded.
    """
    target = device()
    account.reserve(nbytes)
    buffer = target.hal.allocator.allocate_buffer(_DEVICE_LOCAL, _USAGE, nbytes)
    return _flat(target, buffer, nbytes, NOW, "empty")


def _grown(old: DeviceArray, nbytes: int) -> DeviceArray:
    """Return more memory with the bytes of some; rare enough to wait for these."""
    account.reserve(nbytes)
    target = old.device
    if is_watched():
        record(Transfer("wait", "wait", 0, old.ready.work.name, "a storage that grows"))
    (host,) = target.fetch([old])
    bytes_ = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    bytes_[: old.nbytes] = host.reshape(-1).view(torch.uint8)
    view, ready = target.memory.put(bytes_, target.start_point(), "a storage that grows")
    return account.keep(DeviceArray(target, view, (nbytes,), torch.uint8, ready), "resize")


def _flat(target: Device, buffer: Any, nbytes: int, ready: Timepoint, name: str) -> DeviceArray:
    view = hal.HalBufferView(buffer, (nbytes,), int(HAL_TYPES[torch.uint8]))
    return account.keep(DeviceArray(target, view, (nbytes,), torch.uint8, ready), name)


def resize(
    tensor: torch.Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    storage: torch.UntypedStorage | None = None,
) -> None:
    """Give a tensor other sizes and strides; its storage grows if need be, and keeps its bytes.

    Args:
        tensor: on "npu".
        shape: the sizes.
        strides: the strides.
        storage: another storage for it, or None.
    """
    before = tensor.untyped_storage().nbytes()
    handle = held_by(storage or tensor.untyped_storage())
    offset = tensor.storage_offset() if storage is None else 0
    count = compute_required_storage_length(tuple(shape), tuple(strides), int(offset))
    if handle is not None and (nbytes := count * tensor.element_size()) > handle.nbytes:
        account.reserve(nbytes)  # or nothing has changed
    _set.redispatch(_META, tensor, storage or tensor.untyped_storage(), offset, shape, strides)
    grow(tensor)
    if storage is None and tensor.untyped_storage().nbytes() > before:
        fill_unset(_since(tensor, before))


def _since(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return the elements of a tensor's storage that come after so many bytes."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    start, end = nbytes // size, storage.nbytes() // size
    rest = new_tensor((0,), (1,), tensor.dtype)
    _set.redispatch(_META, rest, storage, start, (end - start,), (1,))
    return rest


def fill_unset(tensor: torch.Tensor) -> None:
    """In deterministic mode, fill memory that nobody has set with what shows that it was read.

    Source: `torch.utils.deterministic.fill_uninitialized_memory`, and the values that it names.
    """
    if (
        torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    ):
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(math.nan)
        else:
            tensor.fill_(1 if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage on "npu" as a tensor of bytes."""
    empty = new_tensor((0,), (1,), torch.uint8)
    resize(empty, (storage.nbytes(),), (1,), storage)
    return empty


def grow(tensor: torch.Tensor) -> None:
    """Let the handle of a storage that has become larger hold all of it."""
    storage: Any = tensor.untyped_storage()
    handle = held_by(storage)
    if handle is not None and handle.nbytes < storage.nbytes():
        storage.npu_handle = _grown(handle, storage.nbytes())

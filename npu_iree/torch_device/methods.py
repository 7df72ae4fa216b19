"""What PyTorch's Python classes need to know of "npu": storages that are copied, printing, pinning.

PyTorch makes a storage by asking the device's C++ allocator, and "npu" has none: a storage on it is
that of a tensor.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from npu_iree.torch_device import module
from npu_iree.torch_device.current import NAME, index_of, is_on_npu
from npu_iree.torch_device.fetch import on_host
from npu_iree.torch_device.parameters import keep_parameters
from npu_iree.torch_device.storage import as_bytes, held_by, new_tensor, resize

# PyTorch asks the device's C++ for these, which has neither streams nor an allocator.
_ACCELERATOR: dict[str, Callable[..., Any]] = {
    "synchronize": module.synchronize,
    "current_stream": module.current_stream,
    "set_stream": module.set_stream,
    "empty_cache": module.empty_cache,
    "memory_allocated": module.memory_allocated,
    "max_memory_allocated": module.max_memory_allocated,
    "memory_reserved": module.memory_reserved,
    "max_memory_reserved": module.max_memory_reserved,
    "memory_stats": module.memory_stats,
    "reset_peak_memory_stats": module.reset_peak_memory_stats,
    "reset_accumulated_memory_stats": module.reset_accumulated_memory_stats,
    "get_memory_info": module.mem_get_info,
}


def register_methods() -> None:
    """Teach the classes; once a process."""
    storage: Any = torch.UntypedStorage
    storage.__new__ = staticmethod(_make_instead(storage.__new__))
    for name, ours in _OF_STORAGES.items():
        setattr(storage, name, _instead(getattr(storage, name), ours))
    typed: Any = torch.TypedStorage
    typed.__reduce__ = _reduce_instead(typed.__reduce__)
    storage.to = _move_instead(storage.to)
    storage.npu = _to_npu
    storage.is_npu = property(lambda self: self.device.type == NAME)
    module_class: Any = torch.nn.Module
    module_class._apply = keep_parameters(module_class._apply)
    tensor: Any = torch.Tensor
    tensor.__dlpack_device__ = _cpu_instead(tensor.__dlpack_device__)
    tensor.data_ptr = _address_instead(tensor.data_ptr)
    tensor.record_stream = _record_nothing(tensor.record_stream)
    core: Any = torch._C
    core._to_dlpack_versioned = _from_cpu(core._to_dlpack_versioned)
    core._to_dlpack = _from_cpu(core._to_dlpack)
    for name in ("_accelerator_setDeviceIndex", "_accelerator_exchangeDevice"):
        setattr(core, name, _for_this_device(getattr(core, name)))
    modules: Any = (torch, torch.utils.dlpack)
    for exports in modules:
        exports.to_dlpack = core._to_dlpack
    for name, function in _ACCELERATOR.items():
        setattr(torch.accelerator, name, function)
    parallel: Any = sys.modules[torch.nn.DataParallel.__module__]
    parallel._get_available_device_type = _found_elsewhere(parallel._get_available_device_type)
    torch._tensor_str._tensor_str = _print_on_cpu(torch._tensor_str._tensor_str)


def _found_elsewhere(find: Callable[[], str | None]) -> Callable[[], str | None]:
    """Let `nn.DataParallel` leave a module where it is: there is one device, and nothing to split.

    PyTorch would move the module, and scatter what it is given by C++ that only CUDA has.
    """

    @functools.wraps(find)
    def found() -> str | None:
        kind = find()
        return None if kind == NAME else kind

    return found


def _make_instead(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(cls: type, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != NAME:
            return make(cls, *args, **kwargs)
        index_of(device)
        if args and isinstance(args[0], int):
            return new_tensor((args[0],), (1,), torch.uint8).untyped_storage()
        return _to_npu(make(torch.UntypedStorage, *args))

    return made


def _instead(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Call one method for storages on "npu", and another for all others."""
    npu = torch.device(NAME, 0)  # to compare devices is quicker than to ask for their types

    @functools.wraps(original)
    def chosen(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        return (ours if self.device == npu else original)(self, *args, **kwargs)

    return chosen


def _cloned(self: torch.UntypedStorage) -> torch.UntypedStorage:
    handle = held_by(self)  # its bytes never change: both may hold it
    return new_tensor((self.nbytes(),), (1,), torch.uint8, handle).untyped_storage()


def _address(self: torch.UntypedStorage) -> Any:
    """Tell storages apart, as their addresses do: no host address leads to their bytes."""
    return self._cdata


def _address_instead(data_ptr: Callable[..., int]) -> Callable[..., int]:
    """Let a tensor begin within its storage's address, for what compares both."""

    @functools.wraps(data_ptr)
    def address(self: torch.Tensor) -> int:
        begin = data_ptr(self)  # on "npu" counted from nothing
        if is_on_npu(self) and self.numel():
            begin += self.untyped_storage().data_ptr()
        return begin

    return address


def _fetched(self: torch.UntypedStorage) -> torch.UntypedStorage:
    (flat,) = on_host([as_bytes(self)], "a storage on the CPU")
    return flat.clone().untyped_storage()


def _swapped(self: torch.UntypedStorage, dtype: torch.dtype) -> None:
    raise RuntimeError("bytes on npu:0 cannot be swapped in place; swap those of .cpu()")


def _not_shared(self: torch.UntypedStorage, *_: Any) -> None:
    raise RuntimeError(
        "the memory of npu:0 is of one process: share that of .cpu(), or send the tensor by a "
        "queue of torch.multiprocessing, which copies it"
    )


def _filled(self: torch.UntypedStorage, value: int) -> torch.UntypedStorage:
    as_bytes(self).fill_(value)
    return self


def _written(self: Any, *args: Any, **kwargs: Any) -> None:
    self.cpu()._write_file(*args, **kwargs)


def _read(self: torch.UntypedStorage, *args: Any) -> torch.UntypedStorage:
    host: Any = torch.empty(self.nbytes(), dtype=torch.uint8, device="cpu")
    host.untyped_storage()._set_from_file(*args)
    as_bytes(self).copy_(host)
    return self


def _resized(self: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
    if nbytes < self.nbytes():
        raise RuntimeError(
            f"a storage on npu:0 only grows: {self.nbytes()} bytes cannot become {nbytes}; its "
            "memory is free when no tensor uses it any more"
        )
    resize(new_tensor((0,), (1,), torch.uint8), (nbytes,), (1,), self)
    return self


_OF_STORAGES: dict[str, Callable[..., Any]] = {
    "clone": _cloned,
    "data_ptr": _address,
    "cpu": _fetched,
    "byteswap": _swapped,
    "fill_": _filled,
    "resize_": _resized,
    "share_memory_": _not_shared,
    "_write_file": _written,
    "_set_from_file": _read,
}


def _reduce_instead(reduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def reduced(self: Any) -> Any:
        if self._untyped_storage.device.type != NAME:
            return reduce(self)
        return _typed_on_npu, (_typed(self._untyped_storage.cpu(), self.dtype),)

    return reduced


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    kind: Any = torch.TypedStorage
    return kind(wrap_storage=storage, dtype=dtype, _internal=True)


def _typed_on_npu(storage: torch.TypedStorage) -> Any:
    """Copy a storage to "npu": what an unpickled one is."""
    return _typed(_to_npu(storage._untyped_storage), storage.dtype)


def _move_instead(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def moved(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        kind = torch.device(device).type
        if self.device.type != NAME and kind != NAME:
            return to(self, device=device, non_blocking=non_blocking)
        return _to_npu(self, device) if kind == NAME else self.cpu().to(device=device)

    return moved


def _to_npu(
    self: torch.UntypedStorage, device: Any = None, non_blocking: bool = False
) -> torch.UntypedStorage:
    """Copy a storage to "npu"; what `torch.load` calls."""
    index_of(device)
    if self.device.type == NAME:
        return self
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    flat = empty.set_(self, 0, (self.nbytes(),), (1,))
    return flat.to(NAME).untyped_storage()


def _from_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let DLPack have a copy on the CPU: nobody else may hold, and write to, a handle's bytes."""

    @functools.wraps(method)
    def of_copy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_on_npu(self):
            if kwargs.get("copy") is False:
                raise BufferError("the memory of npu:0 cannot be lent: DLPack gets a copy of it")
            self = self.cpu()
        return method(self, *args, **kwargs)

    return of_copy


def _for_this_device(function: Callable[[int], Any]) -> Callable[[int], Any]:
    @functools.wraps(function)
    def checked(index: int) -> Any:
        index_of(index)
        return function(index)

    return checked


def _record_nothing(record_stream: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(record_stream)
    def recorded(self: torch.Tensor, stream: Any) -> None:
        """Do nothing on "npu": what is submitted keeps the memory that it uses."""
        if not is_on_npu(self):
            record_stream(self, stream)

    return recorded


def _cpu_instead(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def device(self: torch.Tensor) -> Any:
        is_copied = is_on_npu(self)
        return (torch.utils.dlpack.DLDeviceType.kDLCPU, 0) if is_copied else method(self)

    return device


def _print_on_cpu(text_of: Callable[..., str]) -> Callable[..., str]:
    """Let a tensor be printed from a copy on the CPU: one wait, no kernels.

    PyTorch does the same for other devices that compile, by a list that "npu" is not on.
    """

    @functools.wraps(text_of)
    def text(tensor: torch.Tensor, indent: int) -> str:
        return text_of(tensor.cpu() if is_on_npu(tensor) else tensor, indent)

    return text

"""What PyTorch's Python classes need to know of "npu": storages that are copied, printing, pinning.

PyTorch makes a storage by asking the device's C++ allocator, and "npu" has none: a storage on it is
that of a tensor.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.weight_norm import WeightNorm

from npu_iree.torch_device import module
from npu_iree.torch_device.current import NAME, is_on_npu
from npu_iree.torch_device.fetch import on_host
from npu_iree.torch_device.storage import held_by, new_tensor, resize


def register_methods() -> None:
    """Teach the classes; once a process."""
    storage: Any = torch.UntypedStorage
    storage.__new__ = staticmethod(_make_instead(storage.__new__))
    storage.clone = _clone_instead(storage.clone)
    storage.data_ptr = _name_instead(storage.data_ptr)
    typed: Any = torch.TypedStorage
    typed.__reduce__ = _reduce_instead(typed.__reduce__)
    storage.cpu = _fetch_instead(storage.cpu)
    storage.to = _move_instead(storage.to)
    storage.byteswap = _swap_on_cpu(storage.byteswap)
    storage.npu = _to_npu
    storage.is_npu = property(lambda self: self.device.type == NAME)
    module_class: Any = torch.nn.Module
    module_class._apply = _keep_parameters(module_class._apply)
    tensor: Any = torch.Tensor
    tensor.__dlpack__ = _from_cpu(tensor.__dlpack__)
    tensor.__dlpack_device__ = _cpu_instead(tensor.__dlpack_device__)
    accelerator: Any = torch.accelerator
    accelerator.synchronize = module.synchronize
    accelerator.memory_allocated = module.memory_allocated
    accelerator.max_memory_allocated = module.max_memory_allocated
    torch._tensor_str._tensor_str = _print_on_cpu(torch._tensor_str._tensor_str)


def _make_instead(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(cls: type, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != NAME:
            return make(cls, *args, **kwargs)
        if args and isinstance(args[0], int):
            return new_tensor((args[0],), (1,), torch.uint8).untyped_storage()
        return _to_npu(make(torch.UntypedStorage, *args))

    return made


def _clone_instead(clone: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clone)
    def cloned(self: torch.UntypedStorage) -> Any:
        if self.device.type != NAME:
            return clone(self)
        handle = held_by(self)  # its bytes never change: both may hold it
        return new_tensor((self.nbytes(),), (1,), torch.uint8, handle).untyped_storage()

    return cloned


def _name_instead(data_ptr: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(data_ptr)
    def address(self: torch.UntypedStorage) -> int:
        """Tell storages apart, as their addresses do: no host address leads to their bytes."""
        return self._cdata if self.device.type == NAME else data_ptr(self)

    return address


def _fetch_instead(cpu: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(cpu)
    def fetched(self: torch.UntypedStorage) -> Any:
        if self.device.type != NAME:
            return cpu(self)
        (flat,) = on_host([_flat(self)], "a storage on the CPU")
        return flat.clone().untyped_storage()

    return fetched


def _swap_on_cpu(swap: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(swap)
    def swapped(self: torch.UntypedStorage, dtype: torch.dtype) -> None:
        if self.device.type == NAME:
            raise RuntimeError("bytes on npu:0 cannot be swapped in place; swap those of .cpu()")
        swap(self, dtype)

    return swapped


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
        return _to_npu(self) if kind == NAME else self.cpu().to(device=device)

    return moved


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage on "npu" as a tensor of bytes."""
    empty = new_tensor((0,), (1,), torch.uint8)
    resize(empty, (storage.nbytes(),), (1,), storage)
    return empty


def _to_npu(
    self: torch.UntypedStorage, device: Any = None, non_blocking: bool = False
) -> torch.UntypedStorage:
    """Copy a storage to "npu"; what `torch.load` calls."""
    if self.device.type == NAME:
        return self
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    flat = empty.set_(self, 0, (self.nbytes(),), (1,))
    return flat.to(NAME).untyped_storage()


def _keep_parameters(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Let `module.to("npu")` keep the parameter objects: tied ones stay tied, optimizers know them.

    PyTorch gives a parameter other memory in place only between devices on a list of its own; on
    others a module gets new parameters, unless it is told to swap them.
    """

    @functools.wraps(apply)
    def applied(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
        first = next((p.detach() for p in self.parameters(recurse)), None)
        future = torch.__future__
        if first is None or future.get_swap_module_params_on_conversion():
            return apply(self, fn, recurse)
        result = fn(torch.empty(0, dtype=first.dtype, device=first.device))
        if first.device.type == result.device.type or NAME not in (
            first.device.type,
            result.device.type,
        ):
            return apply(self, fn, recurse)
        _let_go_of_weights(self)
        if held := [name for name, p in self.named_parameters(recurse=recurse) if _is_held(p)]:
            more = f" and {len(held) - 1} others" if len(held) > 1 else ""
            raise RuntimeError(
                f"the module cannot move to {result.device} now, and has not: something else holds "
                f"its parameter {held[0]!r}{more}, most likely a result whose backward pass needs "
                "it. Drop that result (`del out`) or run its backward pass first, or compute it "
                "under torch.no_grad()"
            )
        future.set_swap_module_params_on_conversion(True)
        try:
            return apply(self, fn, recurse)
        finally:
            future.set_swap_module_params_on_conversion(False)

    return applied


def _let_go_of_weights(module: torch.nn.Module) -> None:
    """Detach what the old `weight_norm` has computed of parameters: each call does so anew."""
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                setattr(part, hook.name, getattr(part, hook.name).detach())


def _is_held(parameter: torch.nn.Parameter) -> bool:
    """Say whether PyTorch would refuse to swap a parameter or its gradient.

    Source: `torch.utils.swap_tensors`, which is called for one after the other: the refusal of the
    last would leave a module that is half moved.
    """
    gradient: Any = parameter.grad
    tensors = [parameter] if gradient is None else [parameter, gradient]
    if any(map(weakref.getweakrefs, tensors)) or (gradient is not None and _uses(gradient) > 2):
        return True  # the parameter itself is one that uses its gradient
    if _uses(parameter) < 2:
        return False
    node = torch.autograd.graph.get_gradient_edge(parameter).node  # is the second, or is made now
    return node is None or _uses(parameter) > 2


def _uses(tensor: Any) -> int:
    return int(tensor._use_count())


def _from_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let DLPack have a copy on the CPU: nobody else may hold, and write to, a handle's bytes."""

    @functools.wraps(method)
    def of_copy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_on_npu(self):
            self = self.cpu()
        return method(self, *args, **kwargs)

    return of_copy


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

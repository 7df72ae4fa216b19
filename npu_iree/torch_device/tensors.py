"""The ops that every PyTorch device must have of its own: memory, views, copies, numbers read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from npu_iree.frozen import storage_id
from npu_iree.torch_device.current import different_devices, index_of, is_on_npu
from npu_iree.torch_device.fetch import as_lazy, on_host
from npu_iree.torch_device.host import put_into, tell
from npu_iree.torch_device.kernels import NoKernelError
from npu_iree.torch_device.moves import convert, order_for_writing, write
from npu_iree.torch_device.overlaps import check_overlap, check_places
from npu_iree.torch_device.ranges import arange_out
from npu_iree.torch_device.storage import (
    contiguous_strides,
    dense_order,
    fill_unset,
    grow,
    is_lazy,
    new_tensor,
    resize,
    whole,
)

aten = torch.ops.aten
_KEYS = torch._C.DispatchKeySet
_CPU, _META = _KEYS(torch._C.DispatchKey.CPU), _KEYS(torch._C.DispatchKey.Meta)
Tensor = torch.Tensor
# What keeps all digits of a number, where it is not what PyTorch takes unasked.
_WHOLE: dict[type, torch.dtype] = {float: torch.float64, complex: torch.complex128}


def _empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    shape = tuple(size)
    if memory_format in (None, torch.contiguous_format, torch.preserve_format):
        strides = contiguous_strides(shape)
    else:
        strides = torch.empty(shape, memory_format=memory_format, device="meta").stride()
    return _unset(shape, strides, dtype, device)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    return _unset(tuple(size), tuple(stride), dtype, device)


def _zeros(size: Sequence[int], **options: Any) -> Tensor:
    """Make the zeros that forward-mode derivatives ask for; elsewhere they have no memory."""
    return torch.zeros(size, **options)


def _unset(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype | None,
    device: torch.device | None,
) -> Tensor:
    index_of(device)
    if min((*shape, *strides), default=0) < 0:
        torch.empty_strided(shape, strides, device="cpu")  # says what is wrong
    made = new_tensor(shape, strides, dtype or torch.get_default_dtype())
    fill_unset(made)
    return made


def _copy_from(source: Tensor | complex, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between devices, dtypes and layouts; only a copy to the CPU waits."""
    if not isinstance(source, Tensor):  # PyTorch gives numbers to a device in Python as they are
        source = torch.tensor(source, dtype=_WHOLE.get(type(source)), device="cpu")
    if not is_on_npu(target):
        return target.copy_(_host_value(source))
    if dense_order(tuple(target.shape), target.stride()) is None:
        check_places(target)
    if is_on_npu(source):
        _copy_within(source, target)
    else:
        put_into(source, target)
    return target


def _host_value(tensor: Tensor) -> Tensor:
    """Bring a tensor to the CPU, for reading, with what it holds lazily."""
    (host,) = _host_values([tensor])
    return host


def _host_values(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Bring tensors to the CPU behind one wait; see `_host_value`."""
    return [
        as_lazy(host, tensor)
        for host, tensor in zip(on_host(tensors, "the CPU"), tensors, strict=True)
    ]


def _copy_within(source: Tensor, target: Tensor) -> None:
    check_overlap(target, source)
    if is_lazy(source) or is_lazy(target):
        _copy_on_host(source, target, "it is lazily conjugated or negative")
        return
    order = order_for_writing(target)
    try:
        array = convert(source.expand(target.shape), target.dtype, order, is_kept=whole(target))
    except NoKernelError as error:
        _copy_on_host(source, target, str(error))
        return
    write(target, array, order)


def _copy_on_host(source: Tensor, target: Tensor, reason: str) -> None:
    tell(aten.copy_.default, reason)
    put_into(_host_value(source), target)


def _to_copy(
    source: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """Copy to another dtype or device; PyTorch's own would ask for pinned memory to copy to."""
    if torch.nn.parameter.is_lazy(source):  # its class forbids what is asked of tensors
        source = source.data
    shape = tuple(source.shape)
    strides = source.stride()
    if memory_format not in (None, torch.preserve_format) or dense_order(shape, strides) is None:
        like = torch.empty_strided(shape, strides, device="meta")
        strides = torch.empty_like(
            like, memory_format=memory_format or torch.preserve_format
        ).stride()
    place = device if device is not None else source.device
    target = torch.empty_strided(shape, strides, dtype=dtype or source.dtype, device=place)
    return target.copy_(source)


def _copy_from_and_resize(source: Tensor, target: Tensor) -> Tensor:
    if target.shape != source.shape:
        _resize(target, source.shape)
    return _copy_from(source, target)


def _resize(
    tensor: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> Tensor:
    shape = tuple(size)
    strides = contiguous_strides(shape)
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        strides = torch.empty(shape, memory_format=memory_format, device="meta").stride()
    if tuple(tensor.shape) != shape or memory_format is not None:
        resize(tensor, shape, strides)
    return tensor


def _item(tensor: Tensor) -> Any:
    return _host_value(tensor).item()


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.device != other.device:
        raise different_devices([one.device, other.device], "aten.equal")
    return one.shape == other.shape and torch.equal(*_host_values([one, other]))


def _is_set_to(one: Tensor, other: Tensor) -> bool:
    return (
        storage_id(one) == storage_id(other)
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _view(op: Any) -> Callable[..., Any]:
    """Make a view as the CPU's kernel does: it looks at sizes and strides alone."""

    def view(*args: Any, **kwargs: Any) -> Any:
        return op.redispatch(_CPU, *args, **kwargs)

    return view


def _set(op: Any) -> Callable[..., Any]:
    def set_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        op.redispatch(_META, tensor, *args, **kwargs)
        grow(tensor)
        return tensor

    return set_


def _set_nothing(tensor: Tensor) -> Tensor:
    empty = new_tensor((0,), (1,), tensor.dtype)
    resize(tensor, (0,), (1,), empty.untyped_storage())
    return tensor


def _native_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Normalize; the running statistics are written to, of which the op's schema says nothing.

    A momentum that nothing is updated with is 0: kernels of others are the same.
    """
    if mean is None or var is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, training, 0.0, eps)
    if not training:
        return aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, 0.0, eps)
    y, save_mean, save_var, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, training, momentum, eps
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return y, save_mean, save_var


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Drop elements; which, PyTorch's generator says, which is on the host."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if not (x.is_floating_point() or x.is_complex()):
        aten.native_dropout(torch.empty(1, dtype=x.dtype, device="cpu"), p, train)  # says why not
    kept = 1 - p
    mask = torch.empty_like(x, dtype=torch.bool, device="cpu").bernoulli_(kept).to(x.device)
    return (x * mask * (1 / kept) if kept else x * 0), mask


def _draw(op: Any) -> Callable[..., Any]:
    """Fill a tensor with random numbers of PyTorch's generator: they go to the device, no wait.

    They are drawn in the order of its memory, as for a tensor of the CPU.
    """

    def draw(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layout = tensor.shape, tensor.stride()
        host = torch.empty_strided(*layout, dtype=tensor.dtype, device="cpu")
        put_into(op(host, *args, **kwargs), tensor, is_ours=True)
        return tensor

    return draw


def _sparse(op: Any) -> Callable[..., Any]:
    """Make a sparse tensor on the CPU; its gradient comes back as one of the dense tensor."""

    def sparse(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        tell(op, "the device has no sparse tensors: it becomes one of the CPU")
        made: Tensor = op(tensor.cpu(), *args, **kwargs)
        return made

    return sparse


def _has_no_nested_form(*_: Tensor) -> bool:
    """Tell `nn.TransformerEncoder` to keep padded batches: the device has no nested tensors."""
    return False


def _choose_attention(*args: Any, **kwargs: Any) -> int:
    return 0  # the one that is made of other ops


OWN: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_efficientzerotensor": _zeros,
    "resize_": _resize,
    "arange.start_out": arange_out,
    "_to_copy": _to_copy,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
    "_local_scalar_dense": _item,
    "equal": _equal,
    "is_set_to": _is_set_to,
    "as_strided": _view(aten.as_strided.default),
    "as_strided_": _view(aten.as_strided_.default),
    "view": _view(aten.view.default),
    "_reshape_alias": _view(aten._reshape_alias.default),
    "unfold": _view(aten.unfold.default),
    "view_as_real": _view(aten.view_as_real.default),
    "view_as_complex": _view(aten.view_as_complex.default),
    "set_.source_Storage": _set(aten.set_.source_Storage),
    "set_.source_Storage_storage_offset": _set(aten.set_.source_Storage_storage_offset),
    "set_.source_Tensor": _set(aten.set_.source_Tensor),
    "set_": _set_nothing,
    "native_batch_norm": _native_batch_norm,
    "_native_batch_norm_legit": _native_batch_norm,
    "native_dropout": _native_dropout,
    "_fused_sdp_choice": _choose_attention,
    "normal_": _draw(aten.normal_.default),
    "uniform_": _draw(aten.uniform_.default),
    "random_": _draw(aten.random_.default),
    "random_.from": _draw(getattr(aten.random_, "from")),
    "random_.to": _draw(aten.random_.to),
    "bernoulli_.float": _draw(aten.bernoulli_.float),
    "exponential_": _draw(aten.exponential_.default),
    "geometric_": _draw(aten.geometric_.default),
    "log_normal_": _draw(aten.log_normal_.default),
    "cauchy_": _draw(aten.cauchy_.default),
}


def _pin_memory(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a copy: memory of the CPU is as good for the device wherever it is."""
    return tensor.clone()


def _is_pinned(tensor: Tensor, device: torch.device | None = None) -> bool:
    return False


# Made of differentiable ops: they stand before autograd, not behind it.
DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "_nested_tensor_from_mask_left_aligned": _has_no_nested_form,
    "to_sparse": _sparse(aten.to_sparse.default),
    "to_sparse.sparse_dim": _sparse(aten.to_sparse.sparse_dim),
}

# PyTorch asks the accelerator of the process for these, in C++.
ON_CPU: dict[str, Callable[..., Any]] = {"_pin_memory": _pin_memory, "is_pinned": _is_pinned}

"""Bytes between layouts on the device: strided views read and written, dtypes and orders changed.

What has gaps or overlaps in memory is gathered by index, and scattered when it is written. The
index of each geometry is made once; one kernel of each element size serves all ranks and dtypes.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from lowering.eager import Argument, Function
from npu_iree.array import DeviceArray
from npu_iree.torch_device import account
from npu_iree.torch_device.kernels import Bound, family
from npu_iree.torch_device.put import put_dense
from npu_iree.torch_device.storage import (
    contiguous_strides,
    dense_order,
    handle_of,
    set_handle,
    shaped,
    whole,
)

aten = torch.ops.aten
_INDEX_BYTES = 64 << 20  # what the indices that are kept may take
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
_INDICES: OrderedDict[_Geometry, DeviceArray] = OrderedDict()
_INDICES_LOCK = threading.Lock()
_WRITING = threading.RLock()  # part of a storage: its other bytes are read, and written again


def read(tensor: torch.Tensor, order: tuple[int, ...] | None = None) -> DeviceArray:
    """Return the bytes of a tensor in the memory order that it has, or else contiguous.

    Args:
        tensor: on "npu".
        order: its memory order, if the caller knows that it is dense.
    """
    order = order or dense_order(tuple(tensor.shape), tensor.stride())
    return dense_bytes(tensor, order) if order is not None else _gathered(tensor)


def read_in_order(
    tensor: torch.Tensor, order: tuple[int, ...], *, is_kept: bool = False
) -> DeviceArray:
    """Return the bytes of a tensor in a memory order of the caller's.

    Args:
        tensor: on "npu".
        order: the memory order.
        is_kept: a storage will hold them: they are not to hold the rest of the tensor's.
    """
    shape = tuple(tensor.shape)
    if dense_order(shape, tensor.stride()) == order:
        return dense_bytes(tensor, order, is_kept=is_kept)
    array = _gathered(tensor.permute(order))
    return shaped(array, tuple(shape[d] for d in order), tensor.dtype)


def dense_bytes(
    tensor: torch.Tensor, order: tuple[int, ...], *, is_kept: bool = False
) -> DeviceArray:
    """Return the bytes of a dense tensor, in its memory order."""
    array = handle_of(tensor)
    if tensor.storage_offset() or (is_kept and not whole(tensor)):
        array = _range(tensor)
    shape = tuple(tensor.shape)
    return shaped(array, tuple(shape[d] for d in order), tensor.dtype)


def write(tensor: torch.Tensor, array: DeviceArray, order: tuple[int, ...]) -> None:
    """Give a tensor other bytes; all that share its memory see them.

    Args:
        tensor: on "npu".
        array: dense, of the tensor's shape and dtype in the memory order `order`.
        order: the order of a dense tensor; the natural one of a tensor with gaps.
    """
    if tensor.numel() == 0:
        return
    is_dense = dense_order(tuple(tensor.shape), tensor.stride()) == order
    if is_dense and whole(tensor):
        set_handle(tensor, array)
        return
    with _WRITING:
        if is_dense:
            set_handle(tensor, _with_range(tensor, array))
        else:
            _scatter(tensor.permute(order), array)


def order_for_writing(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the memory order in which `write` takes a tensor's bytes."""
    shape = tuple(tensor.shape)
    return dense_order(shape, tensor.stride()) or tuple(range(len(shape)))


def convert(
    tensor: torch.Tensor, dtype: torch.dtype, order: tuple[int, ...], *, is_kept: bool
) -> DeviceArray:
    """Return a tensor's values in another dtype, in a memory order; see `read_in_order`."""
    if tensor.dtype == dtype:
        return read_in_order(tensor, order, is_kept=is_kept)
    array = read_in_order(tensor, order)
    flat = shaped(array, (tensor.numel(),), tensor.dtype)
    key = ("convert", tensor.dtype, dtype)
    (result,) = run_ours(key, lambda tensors: [tensors[0].to(dtype)], [flat], is_ours=False)
    return shaped(result, array.shape, dtype)


def _range(tensor: torch.Tensor) -> DeviceArray:
    """Return the bytes of a dense tensor that is some of its storage."""
    flat, place = _bits_and_place(tensor)
    if tensor.numel() == 0:
        return flat

    def read_range(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        start, length, _ = tensors[1].shape
        return [tensors[0].narrow(0, start, length).clone()]

    (result,) = run_ours(("read range", flat.dtype), read_range, [flat], [place])
    return result


def _with_range(tensor: torch.Tensor, array: DeviceArray) -> DeviceArray:
    """Return the bytes of a tensor's storage with others in the place of the tensor's own."""
    flat, place = _bits_and_place(tensor)

    def write_range(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        start, length, _ = tensors[2].shape
        return [aten.slice_scatter(tensors[0], tensors[1], 0, start, start + length)]

    values = shaped(array, (place.shape[1],), flat.dtype)
    (result,) = run_ours(("write range", flat.dtype), write_range, [flat, values], [place])
    return result


def _bits_and_place(tensor: torch.Tensor) -> tuple[DeviceArray, Argument]:
    """Return a dense tensor's whole storage as integers, and where in there it begins and how long.

    That is told by the sizes of an argument without elements: the kernel takes them as numbers.
    """
    flat, pieces = _bits(tensor)
    shape = (pieces * int(tensor.storage_offset()), pieces * tensor.numel(), 0)
    return flat, Argument(torch.uint8, shape, contiguous_strides(shape))


def _gathered(tensor: torch.Tensor) -> DeviceArray:
    shape = tuple(tensor.shape)
    flat, index = _bits_and_index(tensor)
    if tensor.numel() == 0:
        return shaped(flat, shape, tensor.dtype)
    (result,) = run_ours(
        ("gather", flat.dtype), lambda t: [t[0].index_select(0, t[1])], [flat, index]
    )
    return shaped(result, shape, tensor.dtype)


def _scatter(tensor: torch.Tensor, array: DeviceArray) -> None:
    if tensor.numel() == 0:
        return
    flat, index = _bits_and_index(tensor)
    values = shaped(array, index.shape, flat.dtype)
    (result,) = run_ours(
        ("scatter", flat.dtype),
        lambda t: [aten.index_put(t[0], [t[1]], t[2])],
        [flat, index, values],
    )
    set_handle(tensor, result)


def _bits_and_index(tensor: torch.Tensor) -> tuple[DeviceArray, DeviceArray]:
    """Return a tensor's whole storage as integers, and the places of its elements in there."""
    shape, strides, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    flat, pieces = _bits(tensor)
    if pieces > 1:
        shape, strides = (*shape, pieces), (*(pieces * s for s in strides), 1)
    return flat, _index(shape, strides, pieces * offset)


def _bits(tensor: torch.Tensor) -> tuple[DeviceArray, int]:
    """Return a tensor's whole storage as integers, and how many of them are one element.

    They are narrower than an element where these do not fill the storage: its end is kept, too.
    """
    held, size = tensor.untyped_storage().nbytes(), tensor.element_size()
    nbytes = math.gcd(held, size, max(_BITS))
    return shaped(handle_of(tensor), (held // nbytes,), _BITS[nbytes]), size // nbytes


def _forget_indices() -> None:
    with _INDICES_LOCK:
        _INDICES.clear()


account.CACHES.append(_forget_indices)


def _index(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> DeviceArray:
    """Return the places of a view's elements in its storage, in the order of its dimensions."""
    key = (shape, strides, offset)
    with _INDICES_LOCK:
        if (kept := _INDICES.pop(key, None)) is not None:
            _INDICES[key] = kept
            return kept
    places = torch.tensor(offset, device="cpu")
    for d, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        steps = torch.arange(size, device="cpu") * stride
        places = places + steps.view([-1] + [1] * (len(shape) - 1 - d))
    index = put_dense(places.reshape(-1), "an index", is_ours=True, is_kept=True)
    with _INDICES_LOCK:
        _INDICES[key] = index
        while len(_INDICES) > 1 and sum(i.nbytes for i in _INDICES.values()) > _INDEX_BYTES:
            _INDICES.popitem(last=False)
    return index


def run_ours(
    key: tuple[object, ...],
    function: Function,
    arrays: Sequence[DeviceArray],
    sizes: Sequence[Argument] = (),
    *,
    is_ours: bool = True,
) -> list[DeviceArray]:
    """Run a kernel of our own on arrays, and on arguments that only have sizes.

    Raises:
        NoKernelError: the compiler refused it, or (if not `is_ours`) the target cannot run it.
    """
    arguments = [Argument(a.dtype, a.shape, contiguous_strides(a.shape)) for a in arrays]
    arguments += sizes
    kinds = tuple(min(2, size) for a in arguments for size in a.shape)
    kernels = family((*key, kinds), str(key[0]), is_ours=is_ours)
    bound = kernels.bind(function, arguments, True)
    args = [
        taken if shape is None else shaped(arrays[taken], shape, arrays[taken].dtype)
        for taken, shape in zip(bound.takes, bound.stored, strict=True)
    ]
    return invoke(bound, args)


def invoke(bound: Bound, args: Sequence[Any]) -> list[DeviceArray]:
    """Call a kernel; returns handles in the order of the call's results.

    Args:
        bound: the kernel.
        args: what it takes, in its order: handles in their shapes in memory, and numbers.
    """
    if account.ACCOUNT.limit is not None:
        account.reserve(sum(o.nbytes for o in bound.outputs))
    results = bound.function(*args, is_small=bound.is_small)
    name = bound.function.work.name
    return [account.keep(results[i], name) for i in bound.order]

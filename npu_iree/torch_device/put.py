"""The border of "npu", inwards: CPU tensors go in by a copy that is taken now; nothing waits."""

from __future__ import annotations

import torch

from npu_iree.array import DeviceArray
from npu_iree.frozen import storage_id
from npu_iree.host_memory import dense_copy, why_not_in_place
from npu_iree.memory import HAL_TYPES
from npu_iree.timeline import NOW
from npu_iree.torch_device import account
from npu_iree.torch_device.current import device, user_line
from npu_iree.torch_device.storage import (
    dense_order,
    dense_strides,
    new_tensor,
)
from npu_iree.transfers import Transfer, is_watched, record


def put_dense(
    tensor: torch.Tensor, name: str, *, is_ours: bool = False, is_kept: bool = False
) -> DeviceArray:
    """Give the device a dense CPU tensor; returns at once, the bytes are taken now.

    Args:
        tensor: contiguous.
        name: what it is, for ledger and errors.
        is_ours: nobody else holds its memory, so where memory is unified it is used in place.
        is_kept: later ops use it too, so it waits for no gate, which may fail.

    Raises:
        NotImplementedError: it is quantized.
    """
    if tensor.is_quantized:
        raise NotImplementedError(
            f"{name}: npu has no quantized tensors; leave it on the CPU, or call dequantize() first"
        )
    target = device()
    account.reserve(tensor.nbytes)
    if tensor.dtype not in HAL_TYPES:  # the device keeps it, and computes with it on the host
        tensor = tensor.detach().reshape(-1).view(torch.uint8)
    problem = why_not_in_place(tensor, target.target.alignment_bytes)
    in_place = is_ours and not problem
    if is_watched():
        mode = target.crossing_mode if in_place else "staged"
        record(Transfer("h2d", mode, tensor.nbytes, name, "npu:0", user_line()))
    stored = tensor.detach() if in_place else dense_copy(tensor)
    start = NOW if is_kept else target.start_point()
    view, ready = target.memory.put(stored, start, name)
    if ready is not start:
        target.track(ready, stored.nbytes)
    array = DeviceArray(target, view, tuple(stored.shape), stored.dtype, ready)
    return account.keep(array, name)


def put_in_order(
    tensor: torch.Tensor,
    order: tuple[int, ...],
    name: str,
    *,
    theirs: torch.Tensor | None = None,
) -> DeviceArray:
    """Give the device the values of a CPU tensor in a memory order.

    Args:
        tensor: what; it may be lazily conjugated, or negative.
        order: the memory order.
        name: what it is, for ledger and errors.
        theirs: what it was made of, and somebody else may write to; None: nobody does.
    """
    stored = tensor.resolve_conj().resolve_neg().permute(order).contiguous()
    is_ours = theirs is None or storage_id(stored) != storage_id(theirs)
    return put_dense(stored, name, is_ours=is_ours)


def to_device(tensor: torch.Tensor, name: str, *, is_ours: bool = False) -> torch.Tensor:
    """Give the device a CPU tensor, as a new tensor in the same memory order; see `put_dense`."""
    shape = tuple(tensor.shape)
    order = dense_order(shape, tensor.stride()) or tuple(range(len(shape)))
    array = put_in_order(tensor, order, name, theirs=None if is_ours else tensor)
    return new_tensor(shape, dense_strides(shape, order), tensor.dtype, array)

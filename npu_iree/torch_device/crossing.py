"""The border of "npu": CPU tensors go in by a copy that is taken now, bytes come out behind one wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_iree.array import DeviceArray
from npu_iree.device import dense_copy, why_not_in_place
from npu_iree.torch_device import account
from npu_iree.torch_device.current import device, user_line
from npu_iree.torch_device.storage import (
    copied_range,
    dense_order,
    dense_strides,
    handle_of,
    new_tensor,
)
from npu_iree.transfers import Transfer, is_watched, record

_FETCH_WHOLE = 1 << 16  # bytes: so little of a storage is fetched as a whole


def put_dense(tensor: torch.Tensor, name: str, *, is_ours: bool = False) -> DeviceArray:
    """Give the device a dense CPU tensor; returns at once, the bytes are taken now.

    Args:
        tensor: contiguous.
        name: what it is, for ledger and errors.
        is_ours: nobody else holds its memory, so where memory is unified it is used in place.
    """
    target = device()
    account.reserve(tensor.nbytes)
    problem = why_not_in_place(tensor, target.target.alignment_bytes)
    in_place = is_ours and not problem
    if is_watched():
        mode = target.crossing_mode if in_place else "staged"
        record(Transfer("h2d", mode, tensor.nbytes, name, "npu:0", user_line()))
    stored = tensor.detach() if in_place else dense_copy(tensor)
    view, ready = target.memory.put(stored, target.start_point(), name)
    array = DeviceArray(target, view, tuple(stored.shape), stored.dtype, ready)
    return account.keep(array, name)


def to_device(tensor: torch.Tensor, name: str, *, is_ours: bool = False) -> torch.Tensor:
    """Copy a CPU tensor to a new tensor on the device, in the same memory order."""
    shape = tuple(tensor.shape)
    order = dense_order(shape, tensor.stride()) or tuple(range(len(shape)))
    stored = tensor.resolve_conj().resolve_neg().permute(order).contiguous()
    array = put_dense(stored, name, is_ours=is_ours or stored.data_ptr() != tensor.data_ptr())
    return new_tensor(shape, dense_strides(shape, order), tensor.dtype, array)


def on_host(tensors: Sequence[torch.Tensor], reader: str, reason: str = "") -> list[torch.Tensor]:
    """Bring tensors to the host in one batch, behind one wait; tensors that share memory still do.

    The results are for reading: they may be the device's own bytes.

    Args:
        tensors: tensors on "npu".
        reader: who needs them.
        reason: why.

    Raises:
        DeviceError: the work that makes one of them failed.
        HostCopyError: a `copy_budget` forbids it.
    """
    target = device()
    wanted = [_piece(tensor) for tensor in tensors]
    arrays = list({id(array): array for array, _ in wanted}.values())
    if is_watched():
        where = user_line()
        for array in arrays:
            name = array.ready.work.name
            record(Transfer("d2h", target.crossing_mode, array.nbytes, name, reader, where, reason))
        names = ", ".join(array.ready.work.name for array in arrays)
        record(Transfer("wait", "wait", 0, names, reader, where, reason))
    host = dict(zip(map(id, arrays), target.fetch(arrays), strict=True))
    return [
        _strided(host[id(array)], tensor, offset)
        for tensor, (array, offset) in zip(tensors, wanted, strict=True)
    ]


def _piece(tensor: torch.Tensor) -> tuple[DeviceArray, int]:
    """Return what to fetch of a tensor's storage, and where in it the tensor begins."""
    array, offset = handle_of(tensor), int(tensor.storage_offset())
    is_dense = dense_order(tuple(tensor.shape), tensor.stride()) is not None
    if not is_dense or array.nbytes <= max(_FETCH_WHOLE, 2 * tensor.nbytes):
        return array, offset
    return copied_range(array, offset * tensor.element_size(), tensor.nbytes), 0


def _strided(flat: torch.Tensor, tensor: torch.Tensor, offset: int) -> torch.Tensor:
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(flat.untyped_storage(), offset, tensor.shape, tensor.stride())

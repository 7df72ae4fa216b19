"""The border of "npu", outwards: bytes come out in one batch, behind one wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_iree.array import DeviceArray
from npu_iree.torch_device.current import device, user_line
from npu_iree.torch_device.moves import read
from npu_iree.torch_device.storage import dense_order, handle_of
from npu_iree.transfers import Transfer, is_watched, record

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_FETCH_WHOLE = 1 << 16  # bytes: so little of a storage is fetched as a whole


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
    arrays = list({id(array): array for array, _ in wanted if array.nbytes}.values())
    if arrays and is_watched():
        where = user_line()
        for array in arrays:
            name = array.ready.work.name
            record(Transfer("d2h", target.crossing_mode, array.nbytes, name, reader, where, reason))
        names = ", ".join(array.ready.work.name for array in arrays)
        record(Transfer("wait", "wait", 0, names, reader, where, reason))
    host = dict(zip(map(id, arrays), target.fetch(arrays) if arrays else [], strict=True))
    return [
        strided(host.get(id(array), _NOTHING), tensor, offset)
        for tensor, (array, offset) in zip(tensors, wanted, strict=True)
    ]


def _piece(tensor: torch.Tensor) -> tuple[DeviceArray, int]:
    """Return what to fetch of a tensor's storage, and where in it the tensor begins."""
    array, offset = handle_of(tensor), int(tensor.storage_offset())
    is_dense = dense_order(tuple(tensor.shape), tensor.stride()) is not None
    if not is_dense or array.nbytes <= max(_FETCH_WHOLE, 2 * tensor.nbytes):
        return array, offset
    return read(tensor), 0


def strided(flat: torch.Tensor, tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the elements of a tensor that lie in fetched bytes, from an offset on."""
    view = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return view.set_(flat.untyped_storage(), offset, tensor.shape, tensor.stride())


def as_lazy(host: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return what was fetched of a tensor with what that holds lazily."""
    host = torch._conj(host) if tensor.is_conj() else host
    return torch._neg_view(host) if tensor.is_neg() else host

"""A host tensor's memory: whether it has any, whether the device can use it in place, a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from npu_iree.errors import ArgumentError
from npu_iree.frozen import address_of, extent, storage_address

_unpacked: Callable[[torch.Tensor], Any] = forward_ad.unpack_dual


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values in memory of their own: contiguous, aligned, nothing lazy."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor.detach())


def why_not_in_place(stored: torch.Tensor, alignment_bytes: int) -> str:
    """Say why a tensor's memory cannot be used as it is; empty if it can.

    Raises:
        ArgumentError: it has none, and is no zeros.
    """
    is_without = not storage_address(stored)
    if is_without:
        check_address(stored, "an argument")
    if not stored.is_contiguous() or (stored.numel() == 0 and not _has_own_strides(stored)):
        return "not dense in the order that was compiled for"
    if stored.is_conj() or stored.is_neg():
        return "a lazy conjugate or negative"
    if is_without and stored.numel():
        return "zeros that have no memory"
    if address_of(stored) % alignment_bytes:
        return f"not aligned to {alignment_bytes} bytes"
    return ""


def check_memory(tensor: torch.Tensor, told: str) -> None:
    """Check that a CPU tensor is its memory, or zeros that have none; of any layout and subclass.

    It has no tangent beside it.

    Args:
        tensor: what.
        told: what the error calls it.

    Raises:
        ArgumentError: it is not.
    """
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{told} is {tensor.layout}; give a dense tensor")
    if tensor.is_nested:
        raise ArgumentError(f"{told} is nested; give its parts, or a padded tensor")
    try:
        address = storage_address(tensor)
    except NotImplementedError as error:
        raise ArgumentError(f"{told} {_TRANSFORMED}") from error
    if not address:
        check_address(tensor, told)
    elif _lacks_bytes(tensor):
        raise ArgumentError(f"{told} {_TOO_SMALL}")
    if has_tangent(tensor):
        raise ArgumentError(f"{told} {_TANGENT}")


def has_tangent(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has a tangent of the level of forward-mode AD, beside its memory."""
    return forward_ad._current_level >= 0 and _unpacked(tensor).tangent is not None


def check_address(tensor: torch.Tensor, told: str) -> None:
    """Check that a tensor without an address is empty, or zeros.

    PyTorch's own kernels read address 0 for the others, or have code of their own for them.

    Raises:
        ArgumentError: it is not.
    """
    if isinstance(tensor, FakeTensor):
        raise ArgumentError(
            f"{told} is a fake tensor, which has no numbers: give real ones, or call the function "
            "itself, not compiled, with fake ones"
        )
    if not tensor.numel() or tensor._is_zerotensor():
        return
    if is_functorch_wrapped_tensor(tensor):
        raise ArgumentError(f"{told} {_TRANSFORMED}")
    if _lacks_bytes(tensor):
        raise ArgumentError(f"{told} {_TOO_SMALL}")
    raise ArgumentError(
        f"{told} is a {type(tensor).__name__}, which has no memory of its own; give the plain "
        "tensors that it holds"
    )


_TRANSFORMED = (
    "is of a transform of torch.func (vmap, grad, jvp, functionalize), which no compiled program "
    "can follow; call it outside of the transform, with a plain tensor"
)
_TANGENT = (
    "has a tangent of forward-mode AD (torch.autograd.forward_ad), which is not in its memory; "
    "give torch.autograd.forward_ad.unpack_dual(tensor).primal"
)
_TOO_SMALL = (
    "has more elements than its storage holds, which was resized (untyped_storage().resize_); "
    "resize it back, and write its values, first"
)


def _lacks_bytes(tensor: torch.Tensor) -> bool:
    held = tensor.untyped_storage().nbytes()
    if tensor.is_contiguous() and not tensor.storage_offset():  # of most arguments of every call
        return held < tensor.nbytes
    begin, end = extent(tensor)
    return held < end - storage_address(tensor) if end > begin else False


def _has_own_strides(empty: torch.Tensor) -> bool:
    """Say whether a tensor without elements has the strides that it would be made with.

    PyTorch calls any strides of it contiguous; IREE's import compares them.
    """
    return empty.stride() == make_contiguous_strides_for(empty.shape)

"""Weights that are bound once: how a later change of one is noticed, whoever makes it.

A version counter does not see `p.data.mul_(2)`, and a data pointer sees no write in place. PyTorch's
copy-on-write does: while we hold a lazy clone of a weight's storage, the first write through any
alias of that storage moves it to new memory, and the address tells. Reading never moves it. The
clone also keeps the bytes that the device was given, so they cannot change under it.
Source: `torch._lazy_clone`, c10/core/impl/COW.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

# Where a tensor's bytes are. Unlike `data_ptr()` this does not end a copy-on-write.
address_of = torch._C._data_address


class BoundWeight:
    """One weight as it was when it was bound.

    Attributes:
        address: where the user's tensor was.
        tensor: the bytes, dense in the order that the region wants; never written to.
    """

    __slots__ = ("address", "tensor")

    def __init__(self, weight: torch.Tensor, order: Sequence[int]) -> None:
        self.tensor = frozen(weight).permute(tuple(order))
        self.address = address_of(weight)

    def is_current(self, weight: torch.Tensor) -> bool:
        """Say whether `weight` still is what was bound."""
        return bool(address_of(weight) == self.address)


def can_bind(weight: torch.Tensor) -> bool:
    """Say whether every change of this weight can be noticed.

    It can for memory that PyTorch itself allocated. Memory of others (mapped files, NumPy, shared
    memory) cannot be watched: such weights are passed at each call, in place where alignment
    allows.
    """
    if isinstance(weight, FakeTensor) or weight.device.type != "cpu":
        return False
    if weight.layout is not torch.strided or weight.numel() == 0:
        return False
    try:
        with unset_fake_temporarily():
            torch._lazy_clone(weight.detach())
    except RuntimeError:
        return False
    return True


def frozen(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same bytes that stay as they are, whatever happens to `tensor`.

    From now on `tensor` is copied at the first write to it. The result is for reading only; it may
    be handed to DLPack, which would end the copy-on-write of `tensor` itself.

    Raises:
        RuntimeError: PyTorch did not allocate the memory.
    """
    clone = torch._lazy_clone(tensor.detach())
    storage = clone.untyped_storage()
    offset = clone.storage_offset() * clone.element_size()
    memory = (ctypes.c_char * storage.nbytes()).from_address(address_of(clone) - offset)
    memory.owner = clone
    whole = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
    return whole.as_strided(clone.size(), clone.stride(), clone.storage_offset())

"""Weights that are bound once: how a later change of one is noticed, whoever makes it.

A version counter does not see `p.data.mul_(2)`, and a data pointer sees no write in place. PyTorch's
copy-on-write does: while we hold a lazy clone of a weight's storage, the first write through any
alias of that storage moves it to new memory, and the address tells. Reading never moves it. The
clone also keeps the bytes that the device was given, so they cannot change under it.
Source: `torch._lazy_clone`, c10/core/impl/COW.h.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_address = torch._C._data_address


class BoundWeight:
    """One weight as it was when it was bound.

    Attributes:
        name: its name in the graph.
        tensor: the bytes, dense in the order that the region wants.
        address: where the user's tensor was.
    """

    __slots__ = ("_clone", "address", "name", "order", "tensor")

    def __init__(self, name: str, weight: torch.Tensor, order: Sequence[int]) -> None:
        self.name = name
        self.order = tuple(order)
        self._clone = torch._lazy_clone(weight.detach())
        self.address = _address(weight)
        stored = self._clone.permute(self.order)
        self.tensor = stored if is_dense(stored) else stored.clone(memory_format=torch.contiguous_format)

    def is_current(self, weight: torch.Tensor) -> bool:
        """Say whether `weight` still is what was bound."""
        return bool(_address(weight) == self.address)

    @property
    def bytes_address(self) -> int:
        """Where the bound bytes are; reading it does not end the copy-on-write."""
        return int(_address(self.tensor))


def can_bind(weight: torch.Tensor) -> bool:
    """Say whether every change of this weight can be noticed.

    It can for memory that PyTorch itself allocated. Memory of others (mapped files, NumPy, shared
    memory) cannot be watched: such weights are passed at each call, in place where alignment
    allows.
    """
    if weight.device.type != "cpu" or weight.layout is not torch.strided or weight.numel() == 0:
        return False
    try:
        torch._lazy_clone(weight.detach())
    except RuntimeError:
        return False
    return True


def is_dense(tensor: torch.Tensor, alignment_bytes: int = 64) -> bool:
    """Say whether a tensor's memory can be used as it is."""
    return tensor.is_contiguous() and _address(tensor) % alignment_bytes == 0

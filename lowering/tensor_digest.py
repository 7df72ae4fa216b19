"""What identifies tensors: the SHA-256 of their bytes, and the memory that they are in."""

from __future__ import annotations

import torch

from lowering.digest import bytes_digest


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, dense and in the order of its dimensions."""
    stored = tensor.detach().resolve_conj().resolve_neg()
    data = stored.contiguous().reshape(-1).view(torch.uint8)
    return bytes_digest(data.numpy(force=True).data)  # zeros may have no memory, and refuse else


def is_same_value(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors are of one dtype and shape and hold the same bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return memory_of(one) == memory_of(other) or tensor_digest(one) == tensor_digest(other)


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Name the memory that a tensor is, and what its bytes mean; ends a copy-on-write."""
    lies = tensor.data_ptr(), tensor.shape, tensor.stride()
    return *lies, tensor.dtype, tensor.is_conj(), tensor.is_neg()

"""What identifies bytes, texts, files and tensors: SHA-256."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch


def bytes_digest(data: bytes | memoryview) -> str:
    """Return the SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text, in hexadecimal."""
    return bytes_digest(text.encode())


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sources_digest(package: Path) -> str:
    """Return the SHA-256 of the Python files in a folder and below, with their names."""
    files = sorted(package.rglob("*.py"))
    lines = (f"{path.relative_to(package)} {file_digest(path)}\n" for path in files)
    return text_digest("".join(lines))


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

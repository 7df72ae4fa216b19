"""SHA-256 of what identifies things here: texts, bytes and tensors."""

from __future__ import annotations

import hashlib

import torch


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, dense and in the order of its dimensions."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()

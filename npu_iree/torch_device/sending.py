"""Tensors on "npu" that are sent to other processes go as copies, by way of the CPU."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from npu_iree.torch_device.current import device, is_on_npu


def register_reductions() -> None:
    """Let the queues and arguments of `torch.multiprocessing` send them."""
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduced)


def _reduced(tensor: torch.Tensor) -> Any:
    """Pickle a tensor as a file has it: shared memory would be freed before it is received."""
    is_leaf = tensor.is_leaf or not tensor.requires_grad
    if is_on_npu(tensor) and is_leaf:
        return _received, (device().target.name, pickle.dumps(tensor))
    reduce_tensor: Any = reductions.reduce_tensor  # of what is no leaf, it says what is wrong
    return reduce_tensor(tensor)


def _received(target: str, pickled: bytes) -> Any:
    """Unpickle a tensor in a process that may not have got to register the device yet."""
    from npu_iree.torch_device.registration import register_device

    register_device(target)
    return pickle.loads(pickled)

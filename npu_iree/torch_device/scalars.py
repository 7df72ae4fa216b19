"""Numbers of Python's on the device: as tensors of no dimension, each put there once."""

from __future__ import annotations

from typing import Any

import torch

from npu_iree.array import DeviceArray
from npu_iree.torch_device.forms import Kind, Probe
from npu_iree.torch_device.kept import Kept
from npu_iree.torch_device.put import put_dense

_SCALARS: Kept[tuple[str, torch.dtype, Probe | None], DeviceArray] = Kept(4096)


def scalar(value: float, dtype: torch.dtype, probe: Probe | None = None) -> DeviceArray:
    """Return a number on the device; numbers that were used before are there already.

    Args:
        value: the number.
        dtype: what it becomes.
        probe: what refuses numbers that are too large, or None.

    Raises:
        RuntimeError: it is too large, as PyTorch says it.
    """
    key = (repr(value), dtype, probe)
    array = _SCALARS.get(key)
    if array is None:
        if probe is not None:
            op, kinds = probe
            op(*map(_example, kinds), value=value)
        exact = torch.float64 if isinstance(value, float) else torch.int64
        number = torch.tensor(value, dtype=exact, device="cpu")
        number = number.to(dtype)  # 200 as int8 is -56, as PyTorch has it
        array = put_dense(number, "a number", is_ours=True, is_kept=True)
        _SCALARS[key] = array
    return array


def _example(kind: Kind) -> Any:
    if isinstance(kind, type):
        return kind(1)
    dtype, shape = kind
    return torch.empty(shape, dtype=dtype, device="cpu")

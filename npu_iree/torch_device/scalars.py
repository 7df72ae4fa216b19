"""Numbers of Python's on the device: as tensors of no dimension, each put there once."""

from __future__ import annotations

import torch

from npu_iree.array import DeviceArray
from npu_iree.torch_device.kept import Kept
from npu_iree.torch_device.put import put_dense

Elements = tuple[torch.dtype, int]
_SCALARS: Kept[tuple[str, torch.dtype, Elements | None], DeviceArray] = Kept(4096)


def scalar(value: float, dtype: torch.dtype, fits: Elements | None = None) -> DeviceArray:
    """Return a number on the device; numbers that were used before are there already.

    Args:
        value: the number.
        dtype: what it becomes.
        fits: the dtype that it must not be too large for, and of how many elements: PyTorch lets
            one alone overflow; or None.

    Raises:
        RuntimeError: it is too large, as PyTorch says it.
    """
    key = (repr(value), dtype, fits)
    array = _SCALARS.get(key)
    if array is None:
        if fits is not None:
            torch.empty(fits[1], dtype=fits[0], device="cpu").fill_(value)
        exact = torch.float64 if isinstance(value, float) else torch.int64
        number = torch.tensor(value, dtype=exact, device="cpu")
        number = number.to(dtype)  # 200 as int8 is -56, as PyTorch has it
        array = put_dense(number, "a number", is_ours=True, is_kept=True)
        _SCALARS[key] = array
    return array

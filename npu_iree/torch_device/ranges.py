"""`torch.arange` on the device: whole numbers are counted there, instead of being copied there."""

from __future__ import annotations

from typing import Any

import torch

from lowering.eager import Argument
from npu_iree.array import DeviceArray
from npu_iree.torch_device.host import run_on_host
from npu_iree.torch_device.moves import order_for_writing, run_ours, write
from npu_iree.torch_device.scalars import scalar
from npu_iree.torch_device.storage import contiguous_strides, resize

Tensor = torch.Tensor
_OP = torch.ops.aten.arange.start_out


def arange_out(start: Any, end: Any, step: Any = 1, *, out: Tensor) -> Tensor:
    """Write a range to a tensor; one of other numbers, or none at all, is the host's to make."""
    is_whole = all(type(number) is int for number in (start, end, step))
    count = -((start - end) // step) if is_whole and step else 0
    if count <= 0 or out.dtype is not torch.int64 or out.dim() != 1:
        made: Tensor = run_on_host(_OP, (start, end, step), {"out": out}, "")
        return made
    if out.numel() != count:
        resize(out, (count,), (1,))
    write(out, _counted(start, step, count), order_for_writing(out))
    return out


def _counted(start: int, step: int, count: int) -> DeviceArray:
    """Return `start + i * step`; how many, the kernel takes from the sizes of an argument."""
    shape = (count, 0)
    (result,) = run_ours(
        ("range",),
        lambda t: [torch.arange(t[2].shape[0], device=t[0].device) * t[1] + t[0]],
        [scalar(start, torch.int64), scalar(step, torch.int64)],
        [Argument(torch.uint8, shape, contiguous_strides(shape))],
    )
    return result

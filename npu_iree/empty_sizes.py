"""Regions that are called with an empty tensor: PyTorch runs them.

IREE's CPU driver crashes (SIGSEGV in a worker thread) on a dispatch over no elements, if the size
is dynamic. Nothing is lost: there is little to compute where there are no elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowering.region import Region
from lowering.signature import TensorSpec
from npu_iree.array import DeviceArray
from npu_iree.device import Device
from npu_iree.errors import BadValueError


def may_be_empty(region: Region) -> bool:
    """Say whether a tensor that goes into or comes out of a region has a dynamic size."""
    specs = (*region.signature.inputs, *region.signature.outputs)
    tensors = [spec for spec in specs if isinstance(spec, TensorSpec)]
    return any(isinstance(size, str) for spec in tensors for size in spec.shape)


def is_empty(argument: DeviceArray | int | float | bool) -> bool:
    """Say whether an argument of a region has no elements, or may be a size of 0."""
    if isinstance(argument, DeviceArray):
        return 0 in argument.shape
    return type(argument) is int and argument == 0


def run_on_host(
    device: Device,
    region: Region,
    arguments: Sequence[DeviceArray | int | float | bool],
    parameters: Sequence[torch.Tensor],
) -> list[DeviceArray]:
    """Run a region with PyTorch's CPU kernels: handles in, handles out.

    Args:
        device: whose handles they are.
        region: what to run.
        arguments: as its executable takes them.
        parameters: what it has bound, each in the memory order of the region.

    Raises:
        BadValueError: it was given a value that eager refuses.
    """
    handles = [a for a in arguments if isinstance(a, DeviceArray)]
    tensors = iter(device.gather(handles))
    values = [next(tensors) if isinstance(a, DeviceArray) else a for a in arguments]
    with torch.no_grad():
        results = region.graph_module(*values, *parameters)
    if region.signature.checks and (check := region.signature.failed(int(results.pop()))):
        raise BadValueError.of(check, region.name)
    return [device.put(result) for result in results]

"""What Dynamo asks of a device: its interface for "npu"."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import trace_rules
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device

from npu_iree.torch_device import module

_OURS: Any = ("npu_iree", "lowering")


class NpuInterface(DeviceInterface):
    """`torch.npu`, as Dynamo wants to have it."""

    device = module.device
    Event = module.Event
    Stream = module.Stream

    @staticmethod
    def current_device() -> int:
        """Return the index of the current device."""
        return module.current_device()

    @staticmethod
    def set_device(device: torch.types.Device) -> None:
        """Check that a device is the one there is."""
        module.set_device(device)

    @staticmethod
    def device_count() -> int:
        """Return how many devices there are."""
        return module.device_count()

    @staticmethod
    def is_available() -> bool:
        """Say whether there is a device."""
        return module.is_available()

    @staticmethod
    def synchronize(device: torch.types.Device = None) -> None:
        """Wait until everything that was submitted has ended."""
        module.synchronize(device)

    @staticmethod
    def current_stream() -> Any:
        """Return the current stream."""
        return module.current_stream()

    @staticmethod
    def get_device_properties(device: torch.types.Device = None) -> Any:
        """Return the device's properties."""
        return module.get_device_properties(device)

    @staticmethod
    def get_compute_capability(device: torch.types.Device = None) -> Any:
        """Return (0, 0): the capability table of the target says what the device can."""
        return module.get_device_capability(device)

    @staticmethod
    def is_bf16_supported(including_emulation: bool = False) -> bool:
        """Say whether bf16 is there."""
        return module.is_bf16_supported()

    @staticmethod
    def memory_allocated(device: torch.types.Device = None) -> int:
        """Return the bytes that handles hold."""
        return module.memory_allocated(device)


def register_dynamo() -> None:
    """Let Dynamo know the device, and leave alone the Python code that runs its ops.

    PyTorch calls that code wherever an op is called: between the graphs of a compiled function,
    too, where Dynamo looks at each function that is called.
    """
    for package in _OURS:
        trace_rules.add(package)
    for name in ("npu", "npu:0"):
        register_interface_for_device(name, NpuInterface)

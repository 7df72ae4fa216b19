"""What Dynamo asks of a device: its interface for "npu"."""

from __future__ import annotations

from typing import Any

from torch._dynamo import trace_rules
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device

from npu_iree.torch_device import module

_OURS: Any = ("npu_iree", "lowering")


class NpuInterface(DeviceInterface):
    """`torch.npu`, as Dynamo wants to have it."""

    device = module.device
    Event = module.Event
    Stream = module.Stream

    current_device = staticmethod(module.current_device)
    set_device = staticmethod(module.set_device)
    device_count = staticmethod(module.device_count)
    is_available = staticmethod(module.is_available)
    synchronize = staticmethod(module.synchronize)
    current_stream: Any = staticmethod(module.current_stream)  # of a class that is not torch.Stream
    get_device_properties = staticmethod(module.get_device_properties)
    get_compute_capability = staticmethod(module.get_device_capability)
    memory_allocated = staticmethod(module.memory_allocated)

    @staticmethod
    def is_bf16_supported(including_emulation: bool = False) -> bool:
        """Say whether bf16 is there."""
        return module.is_bf16_supported()


def register_dynamo() -> None:
    """Let Dynamo know the device, and leave alone the Python code that runs its ops.

    PyTorch calls that code wherever an op is called: between the graphs of a compiled function,
    too, where Dynamo looks at each function that is called.
    """
    for package in _OURS:
        trace_rules.add(package)
    for name in ("npu", "npu:0"):
        register_interface_for_device(name, NpuInterface)

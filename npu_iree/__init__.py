"""PyTorch for an NPU: `torch.compile(model, backend="npu_iree")` on asynchronous handles."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

__version__ = "0.1.0"

# name -> module; loaded at first use: `import npu_iree` loads no compiler and opens nothing.
_PUBLIC = {
    "ArtifactError": "npu_iree.errors",
    "ArgumentError": "npu_iree.errors",
    "BadValueError": "npu_iree.errors",
    "BuildOptions": "npu_iree.offline.build",
    "Candidate": "lowering.target",
    "CapabilityError": "npu_iree.errors",
    "Choice": "lowering.target",
    "CompileTarget": "lowering.target",
    "Device": "npu_iree.device",
    "DeviceArray": "npu_iree.array",
    "DeviceError": "npu_iree.errors",
    "DeviceTimeoutError": "npu_iree.errors",
    "DonatedTensorError": "npu_iree.errors",
    "EagerOnlyError": "npu_iree.errors",
    "ExportError": "npu_iree.errors",
    "FlagError": "npu_iree.errors",
    "HostCopyError": "npu_iree.errors",
    "IndexOutOfRangeError": "npu_iree.errors",
    "IntegerDivisionError": "npu_iree.errors",
    "KernelError": "npu_iree.errors",
    "Ledger": "npu_iree.transfers",
    "NotCompiledError": "npu_iree.errors",
    "NpuIreeError": "npu_iree.errors",
    "OptionError": "npu_iree.errors",
    "Options": "npu_iree.options",
    "SourceError": "npu_iree.errors",
    "StageError": "npu_iree.errors",
    "Target": "npu_iree.targets",
    "TargetError": "npu_iree.errors",
    "Transfer": "npu_iree.transfers",
    "UnsupportedOpError": "npu_iree.errors",
    "VerificationError": "npu_iree.errors",
    "VersionError": "npu_iree.errors",
    "WorkerStartError": "npu_iree.errors",
    "copy_budget": "npu_iree.transfers",
    "explain": "npu_iree.explain",
    "load": "npu_iree.offline.load",
    "open_device": "npu_iree.device",
    "ready": "npu_iree.waiting",
    "record_timeline": "npu_iree.recording",
    "record_transfers": "npu_iree.transfers",
    "register_kernel": "npu_iree.kernels",
    "register_device": "npu_iree.torch_device.registration",
    "save_bundle": "npu_iree.bundles",
    "save_parameters": "npu_iree.offline.parameter_files",
    "targets": "npu_iree.targets",
    "wait_any": "npu_iree.waiting",
    "write_artifact": "npu_iree.offline.build",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


class _Package(types.ModuleType):
    """This package: importing a module does not hide the public function of the same name."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _PUBLIC or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

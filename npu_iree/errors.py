"""The runtime's errors, beside those of the compiler half; all under `NpuIreeError`."""

from __future__ import annotations

from collections.abc import Sequence

from lowering.capabilities import CapabilityError
from lowering.errors import (
    ArtifactError,
    ExportError,
    FlagError,
    HostOp,
    InternalError,
    NotCompiledError,
    NpuIreeError,
    StageError,
    UnsupportedOpError,
    WorkerStartError,
    shortened,
)
from lowering.kernels import KernelError
from lowering.signature import Check

__all__ = [
    "ArgumentError",
    "ArtifactError",
    "BadValueError",
    "CapabilityError",
    "DeviceError",
    "DeviceTimeoutError",
    "DonatedTensorError",
    "EagerOnlyError",
    "ExportError",
    "FlagError",
    "HostCopyError",
    "HostOp",
    "IndexOutOfRangeError",
    "IntegerDivisionError",
    "InternalError",
    "KernelError",
    "NotCompiledError",
    "NpuIreeError",
    "OptionError",
    "SourceError",
    "StageError",
    "TargetError",
    "UnsupportedOpError",
    "VerificationError",
    "VersionError",
    "WorkerStartError",
]

# What code of others may raise as it is imported or called: its `sys.exit` ends no process of ours.
FOREIGN = (Exception, SystemExit)

# What to do where the device of a parent process is asked for something.
IN_A_CHILD = (
    "compile again there (torch._dynamo.reset()), or start it by `spawn`; a DataLoader whose "
    "workers read tensors takes those of the CPU, and its batches are moved to the device"
)


class OptionError(NpuIreeError, ValueError):
    """An option of `torch.compile` or the command line does not exist or has a bad value."""


class TargetError(NpuIreeError):
    """There is no such target, or its device cannot be opened here."""


class VerificationError(NpuIreeError):
    """An artifact does not give eager's numbers."""


class EagerOnlyError(NpuIreeError):
    """A graph does what only PyTorch's own kernels can do, one by one."""


class VersionError(NpuIreeError):
    """Another version of torch, torch-mlir or IREE is installed than the set that was verified."""


class ArgumentError(NpuIreeError, ValueError):
    """An argument of a loaded artifact is not what it was compiled for; nothing has run."""


class SourceError(NpuIreeError):
    """What was given to be compiled is not there, or cannot be exported."""


class HostCopyError(NpuIreeError):
    """A host copy or wait broke a `copy_budget`.

    Attributes:
        transfer: what was about to happen; it has not been done.
    """

    def __init__(self, transfer: object, limit: str) -> None:
        self.transfer = transfer
        super().__init__(f"this would break copy_budget({limit}): {transfer}")


class DeviceError(NpuIreeError):
    """Work on the device failed; raised where somebody waits for it.

    Attributes:
        region: what failed: a region, a transfer or a gate.
        ops: `op at user line` of what it computes.
        cause: what the device said.
    """

    def __init__(self, region: str, ops: Sequence[str], cause: str) -> None:
        self.region = region
        self.ops = tuple(ops)
        self.cause = cause
        computes = f"\n  it computes:{_shown(self.ops)}" if self.ops else ""
        super().__init__(f"{region} failed on the device: {cause}{computes}")


class BadValueError(DeviceError, RuntimeError):
    """The device was given a value that eager refuses, and has gone on with another.

    Raised where somebody waits for what was computed with it, or for anything that follows.
    """

    @staticmethod
    def of(check: Check, region: str, ops: Sequence[str] = ()) -> BadValueError:
        """Make the error of a check that has failed in a region."""
        return _CHECK_ERRORS[check.kind](region, ops, check.text)

    def __str__(self) -> str:
        lines = [op.partition(" at ")[2] for op in self.ops]
        is_told = any(line and line in self.cause for line in lines)
        shown = "" if is_told else _shown(self.ops)
        return f"{self.cause} (found by {self.region} on the device){shown}"


class IndexOutOfRangeError(BadValueError, IndexError):
    """An index lies outside of the tensor that it is for.

    The device has read and written within the tensor, at another place.
    """


class IntegerDivisionError(BadValueError, ZeroDivisionError):
    """An integer is divided by zero."""


class DeviceTimeoutError(NpuIreeError, TimeoutError):
    """A wait ended before the device did; the work goes on, and one may wait again."""


class DonatedTensorError(NpuIreeError, RuntimeError):
    """A tensor is used after a call has taken its memory over."""


def _shown(ops: Sequence[str]) -> str:
    return "".join(f"\n    {op}" for op in shortened(ops, 8, "... and {} more ops"))


# What a region's checks find (`lowering.signature.Check.kind`) -> the error.
_CHECK_ERRORS: dict[str, type[BadValueError]] = {
    "assertion": BadValueError,
    "division": IntegerDivisionError,
    "index": IndexOutOfRangeError,
}

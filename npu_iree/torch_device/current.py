"""The device behind "npu": which target, which fallback, and where in the user's code we are."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, Literal

import torch

from npu_iree.device import Device
from npu_iree.errors import NpuIreeError

NAME = "npu"
Fallback = Literal["host", "error"]
Which = torch.device | int | str | None

# Frames of these are not the user's.
_OURS = tuple(
    str(Path(module.__file__ or "").parent) + "/"
    for module in (torch, sys.modules["npu_iree"], sys.modules["lowering"])
)
_DEPTH = 64


@dataclass
class Current:
    """What is registered.

    Attributes:
        device: the device of "npu:0", or None before `register_device`.
        fallback: `host` runs what cannot be compiled as PyTorch's CPU kernel; `error` raises.
        warned: ops for which it has been said that they run on the host.
    """

    device: Device | None = None
    fallback: Fallback = "host"
    warned: set[str] = field(default_factory=set)


CURRENT = Current()
FALLBACK: ContextVar[Fallback | None] = ContextVar("FALLBACK", default=None)  # that of a block


def is_on_npu(value: Any) -> bool:
    """Say whether a value is a tensor on "npu", real or fake."""
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def different_devices(devices: Sequence[torch.device], op: object) -> RuntimeError:
    """Return what PyTorch raises for tensors of several devices."""
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{devices[0]} and {devices[1]}! (when checking the arguments of {op})"
    )


def device() -> Device:
    """Return the device behind "npu".

    Raises:
        NpuIreeError: `register_device` has not been called.
    """
    if CURRENT.device is None:
        raise NpuIreeError('there is no device "npu" yet: call npu_iree.register_device() first')
    return CURRENT.device


def index_of(which: Which) -> int:
    """Return the index of a device, which is 0: there is one.

    Raises:
        RuntimeError: it is another one.
    """
    if which is None or which == 0:
        return 0
    found = torch.device(NAME, which) if isinstance(which, int) else torch.device(which)
    if found.type != NAME or (found.index or 0) != 0:
        raise RuntimeError(f"there is one device, npu:0; {which} is no such device")
    return 0


Place = tuple[Any, ...]  # code and offset of each frame, one after the other


def frames(depth: int = 12) -> Place:
    """Return where we were called from, innermost first: as cheap as it can be told later."""
    found: list[CodeType | int] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < 2 * depth:
        found += (frame.f_code, frame.f_lasti)
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def line_of(place: Place) -> str:
    """Say which line of the user's a place is: `file:line in function`, or nothing."""
    for code, offset in frames_of(place):
        if not code.co_filename.startswith(_OURS):
            return f"{code.co_filename}:{_line(code, offset)} in {code.co_name}"
    return ""


def stack_of(place: Place) -> list[str]:
    """Return the Python stack of a place, innermost first, without our own frames."""
    ours = _OURS[1:]
    return [
        f"{code.co_filename}:{_line(code, offset)} in {code.co_name}"
        for code, offset in frames_of(place)
        if not code.co_filename.startswith(ours)
    ]


def user_line() -> str:
    """Return the line of the user's code that we are in."""
    return line_of(frames(_DEPTH))


def frames_of(place: Place) -> Iterator[tuple[CodeType, int]]:
    """Give the frames of a place, innermost first: their code, and where in it they were."""
    return zip(place[::2], place[1::2], strict=True)


def _line(code: CodeType, offset: int) -> int:
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= offset < end and number is not None:
            line = number
    return line

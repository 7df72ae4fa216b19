"""What was launched where: the line of the user's code that a failure names."""

from __future__ import annotations

from collections.abc import Sequence

from npu_iree.array import DeviceArray
from npu_iree.timeline import Work
from npu_iree.torch_device.current import Place, line_of, stack_of


class Launch(Work):
    """A call of eager mode, and where it was launched from, which is only worked out if asked."""

    __slots__ = ("place",)
    place: Place

    def __init__(self, name: str, place: Place) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "place", place)

    @property
    def ops(self) -> tuple[str, ...]:
        """The op at the user's line, then the Python stack that launched it."""
        stack = stack_of(self.place)[1:]
        first = f"{self.name} at {line_of(self.place)}"
        return (first, *(f"  called from {frame}" for frame in stack))


def launched(arrays: list[DeviceArray], place: Place) -> Sequence[DeviceArray]:
    """Let the handles of a call know where it was launched from."""
    for array in arrays[:1]:  # they share their point in time
        array.ready.name(Launch(array.ready.work.name, place))
    return arrays

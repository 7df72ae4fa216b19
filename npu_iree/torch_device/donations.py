"""Storages whose bytes a call has taken over, and what is told to whoever uses them afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from npu_iree.compiled_call import is_wrapper
from npu_iree.errors import DonatedTensorError
from npu_iree.torch_device.current import Place, frames, frames_of, line_of

_DEPTH = 64


@dataclass(frozen=True)
class Donation:
    """One tensor given to one call.

    Attributes:
        name: what the call knows it as.
        function: what was called.
        place: where from.
    """

    name: str
    function: str
    place: Place

    def error(self) -> DonatedTensorError:
        """Return what a use of the tensor, or of another one in that memory, is told."""
        where = line_of(self.place)
        return DonatedTensorError(
            f"this tensor's memory was donated to {self.function}, as {self.name!r}, "
            f"{f'at {where}' if where else 'by a call'}: neither it nor its views hold anything "
            "since. Use what that call returned; or, to go on using the tensor, donate a clone of "
            f"it, or take {self.name!r} out of the option 'donate' of torch.compile"
        )


def call_place() -> Place:
    """Return where the compiled function was called from that we are in.

    On the way there is a frame of the function itself, which runs what Dynamo has made of it.
    """
    place = frames(_DEPTH)
    codes = [code for code, _ in frames_of(place)]
    inside = next((i for i, code in enumerate(codes) if is_wrapper(code)), -1)
    return place[2 * (inside + 1) :]

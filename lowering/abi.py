"""The contract between compiled modules and the runtime: names, and what they stand for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

ENTRY = "main"
PARAMETER_SCOPE = "model"


def parameter_name(index: int) -> str:
    """Return the name under which a region's parameter `index` is bound."""
    return f"p{index}"


# Functions of a module: lend it memory for what a call computes on the way, and take it back.
LEND, TAKE_BACK = "lend$memory", "take$back"
LENT_BYTES = "lent_bytes"  # reflected by the first: see `read_sizes`

BOUND = "bound"  # reflected by a bind function: see `Binding.read`


@dataclass(frozen=True, order=True)
class Binding:
    """What a bind function does if it is told a number.

    Attributes:
        step: its place in the order in which such are to run.
        parameters: after a change of which it is to run.
        which: the number.
    """

    step: int
    parameters: tuple[str, ...]
    which: int

    @classmethod
    def read(cls, bound: str) -> Iterator[Binding]:
        """Read what a function reflects: `0:p0 3:p2,p4` is step 0 after p0, 3 after p2 or p4."""
        for which, text in enumerate(bound.split()):
            step, _, names = text.partition(":")
            yield cls(int(step), tuple(names.split(",")), which)


def bind_function(number: int) -> str:
    """Return the name of a function that binds parameters anew: (view, which, wait, signal)."""
    return f"bind${number}"


def write_sizes(sizes: Mapping[str, int]) -> str:
    """Write how many bytes entry points are lent, by name."""
    return json.dumps(dict(sizes))


def read_sizes(text: str) -> dict[str, int]:
    """Read what `write_sizes` wrote."""
    return {str(name): int(nbytes) for name, nbytes in json.loads(text).items()}

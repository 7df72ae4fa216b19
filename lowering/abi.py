"""The contract between compiled modules and the runtime: names, and what they stand for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass
from functools import cached_property

ENTRY = "main"
PARAMETER_SCOPE = "model"
# What IREE's runtime passes to a device program of a CPU at most; it loads none that takes more.
MOST_TENSORS = 32
MOST_WORDS = 64  # of 32 bits, for sizes and numbers


def parameter_name(index: int) -> str:
    """Return the name under which a region's parameter `index` is bound."""
    return f"p{index}"


# Functions of a module: lend it memory for what calls compute on the way, and take it back; and
# memory for the results of the next call.
LEND, TAKE_BACK = "lend$memory", "take$back"
LEND_RESULTS, TAKE_RESULTS_BACK = "lend$results", "take$results$back"
LENT_BYTES = "lent_bytes"  # reflected by those that lend: see `read_sizes`

# A function that returns the memory in which what is made of parameters lies; it reflects what can
# be bound anew. One that swaps the memory of a parameter that is used as it is: (memory, which).
MADE, SWAP = "made$memory", "swap$memory"
REBINDING = "rebinding"


@dataclass(frozen=True)
class Made:
    """Something that is made of parameters, and how to make it anew where it lies.

    Attributes:
        function: the number of the bind function.
        memory: which of what `made$memory` returns it lies in.
        offset: where in that, in bytes.
        nbytes: how many bytes it takes there.
        parameters: their names, in the order in which the function takes them.
    """

    function: int
    memory: int
    offset: int
    nbytes: int
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Rebinding:
    """How parameters get new values without a load.

    Attributes:
        parameters: the names of those that can.
        made: what is made of them.
        swapped: the names of those that are used as they are, by their number for `swap$memory`.
    """

    parameters: frozenset[str] = frozenset()
    made: tuple[Made, ...] = ()
    swapped: tuple[str, ...] = ()

    def made_of(self, names: Set[str]) -> Iterator[Made]:
        """Give what is made of some of these parameters."""
        return (one for one in self.made if not names.isdisjoint(one.parameters))

    @cached_property
    def partners(self) -> frozenset[str]:
        """The parameters that something is made of together with others."""
        several = [one.parameters for one in self.made if len(one.parameters) > 1]
        return frozenset(itertools.chain.from_iterable(several))

    def write(self) -> str:
        """Write it as text."""
        fields = {**asdict(self), "parameters": sorted(self.parameters)}
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> Rebinding:
        """Read what `write` wrote."""
        read = json.loads(text)
        made = [Made(**{**one, "parameters": tuple(one["parameters"])}) for one in read["made"]]
        return cls(frozenset(read["parameters"]), tuple(made), tuple(read["swapped"]))


def bind_function(number: int) -> str:
    """Return the name of what makes something anew: (views, memory, offset, size, fences)."""
    return f"bind${number}"


def write_sizes(sizes: Mapping[str, int]) -> str:
    """Write how many bytes entry points are lent, by name."""
    return json.dumps(dict(sizes))


def read_sizes(text: str) -> dict[str, int]:
    """Read what `write_sizes` wrote."""
    return {str(name): int(nbytes) for name, nbytes in json.loads(text).items()}

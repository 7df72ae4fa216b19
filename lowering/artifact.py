"""What a compiled program is: a .vmfb, its entry points and where it came from; stdlib only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowering.signature import Signature


@dataclass(frozen=True)
class EntryPoint:
    """One function of an artifact that may be called.

    Attributes:
        signature: what it takes and gives.
        ops: what it computes: op names and the user's lines, as text, for reports and errors.
    """

    signature: Signature
    ops: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Artifact:
    """A program, compiled.

    Attributes:
        name: name of the program.
        vmfb: the module; its entry points are on the coarse-fences ABI, its parameters in the scope
            `model`. Where parameters may change between calls, functions `bind$<number>` bind
            them anew (`lowering.stages.flow.bind_functions`).
        entries: the entry points by name.
        flags: the compiler flags that were chosen.
    """

    name: str
    vmfb: bytes
    entries: Mapping[str, EntryPoint]
    flags: tuple[str, ...] = ()

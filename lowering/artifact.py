"""What a compiled region is: a .vmfb, its signature and where it came from; stdlib only."""

from __future__ import annotations

from dataclasses import dataclass

from lowering.signature import Signature


@dataclass(frozen=True)
class Artifact:
    """A region, compiled.

    Attributes:
        name: name of the region.
        vmfb: the module; entry point `main` on the coarse-fences ABI; parameters `p0`, `p1`, ...
            in the scope `model`, and for each a function `bind$p0`, ... that binds it anew.
        signature: what the entry point takes and gives.
        flags: the compiler flags that were chosen.
        ops: what it computes: op names and the user's lines, as text, for reports and errors.
    """

    name: str
    vmfb: bytes
    signature: Signature
    flags: tuple[str, ...]
    ops: tuple[tuple[str, str], ...]

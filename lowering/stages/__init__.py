"""The stages that turn a region's graph into a .vmfb: one function and one `Stage` value a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """What the stages may know beside their input; the value is printable and comparable.

    Attributes:
        flags: `iree-compile` flags.
        parameters: how many of the entry point's last arguments are parameters, bound once.
    """

    flags: tuple[str, ...] = ()
    parameters: int = 0


@dataclass(frozen=True)
class Stage:
    """One step of the lowering.

    Attributes:
        name: e.g. `torch-to-linalg`.
        product: how a dump of the result is named, e.g. `linalg.mlir`.
        run: the step: (input, options) -> output.
        verify: looks at the output and returns what is wrong with it, or None.
    """

    name: str
    product: str
    run: Callable[[Any, CompileOptions], Any]
    verify: Callable[[Any], str | None]

"""The stages that turn a region's graph into a .vmfb: one function and one `Stage` value a file.

What they change of a module themselves is in folders, by the dialect that it is in by then:
`linalg`, `flow`, `code` (of device programs); `ir` is what these read and write it with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """What the stages may know beside their input; the value is printable and comparable.

    Attributes:
        flags: `iree-compile` flags.
        parameters: entry point -> the names of the parameters that its last arguments are. Those
            are bound once, at load; entry points that name the same one share it.
        given: entry point -> the positions of the arguments that it may overwrite.
        rebind: whether parameters can be bound anew without a load.
        kernels: custom op -> the MLIR that is to run it (`lowering.kernels`).
    """

    flags: tuple[str, ...] = ()
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    given: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rebind: bool = False
    kernels: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_for_cpu(self) -> bool:
        """Whether the code is for a CPU."""
        return any(flag.endswith("=llvm-cpu") for flag in self.flags)

    def to_json(self) -> dict[str, Any]:
        """Return the options as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CompileOptions:
        """Take options back from plain values.

        Raises:
            KeyError, TypeError, AttributeError: they are no options.
        """
        return cls(
            flags=tuple(values["flags"]),
            parameters={entry: tuple(names) for entry, names in values["parameters"].items()},
            given={entry: tuple(positions) for entry, positions in values["given"].items()},
            rebind=bool(values["rebind"]),
            kernels={str(op): str(text) for op, text in values["kernels"].items()},
        )


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

"""What ops are called, which ops there are in others, and what makes a value."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

CONFIG = "lowering_config"  # of an op: the sizes of its loops
_CONSTANTS = frozenset({"arith.constant", "llvm.mlir.constant"})


def symbol_of(op: Any) -> str:
    """Return what an op is called in its module."""
    return str(op.attributes["sym_name"].value)


def global_of(op: Any) -> str:
    """Return the name of the global that an op loads or stores."""
    return str(op.attributes["global"].value)


def walk(op: Any) -> Iterator[Any]:
    """Return an operation and all in it."""
    operation = op.operation
    yield operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from walk(inner)


def inside(op: Any, kind: str) -> list[Any]:
    """Return the ops of one kind in an op's own blocks."""
    blocks = [block for region in op.operation.regions for block in region.blocks]
    return [op for block in blocks for op in block.operations if op.operation.name == kind]


def ops_of(op: Any) -> list[Any]:
    """Return the ops in an op's own block: of a function, or in the body of a loop."""
    return [inner.operation for inner in op.regions[0].blocks[0].operations]


def variants(module: Any) -> list[Any]:
    """Return the device code of a module: of each executable, what is for one target."""
    executables = inside(module, "hal.executable")
    return [variant for op in executables for variant in inside(op, "hal.executable.variant")]


def device_functions(module: Any, kind: str = "llvm.func") -> list[Any]:
    """Return the functions of a module's device code: in the LLVM dialect, or of another kind."""
    modules = [op for variant in variants(module) for op in inside(variant, "builtin.module")]
    return [function for op in modules for function in inside(op, kind)]


def maker_of(value: Any) -> str:
    """Return the name of the op that makes a value; none if it is the argument of a block."""
    return getattr(value.owner, "name", "")


def origin_of(value: Any, through: Collection[str]) -> Any:
    """Return what a value comes from, through the first operands of ops of some names."""
    while maker_of(value) in through:
        value = value.owner.operands[0]
    return value


def constant_of(value: Any) -> int | None:
    """Return the number that a value is, on the host or a device; None if it is computed."""
    is_constant = maker_of(value) in _CONSTANTS
    return value.owner.attributes["value"].value if is_constant else None


def drop_unread(function: Any) -> None:
    """Erase what makes tensors that nothing reads: what it reads would count as read twice."""
    for op in reversed(ops_of(function)):
        is_read = any(True for result in op.results for _ in result.uses)
        if op.name.startswith(("linalg.", "tensor.")) and not is_read:
            op.operation.erase()

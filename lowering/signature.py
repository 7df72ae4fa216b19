"""What crosses a region's boundary: dtypes, shapes, memory order; stdlib only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

# Of eager's error: an index out of range, an integer divided by zero, or `torch._assert_async`.
CheckKind: TypeAlias = Literal["index", "division", "assertion"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a region's boundary.

    Attributes:
        dtype: its name in `lowering.dtypes`.
        shape: a size or, where it may change from call to call, the text of its expression.
        order: the dimensions from the slowest to the fastest in memory: `(0, 1, 2, 3)` is
            contiguous, `(0, 2, 3, 1)` channels-last. The device sees a dense buffer in this order.
    """

    dtype: str
    shape: tuple[int | str, ...]
    order: tuple[int, ...]

    def __str__(self) -> str:
        text = "x".join(str(s) for s in (*self.shape, self.dtype))
        return text if self.is_contiguous else f"{text}@{''.join(map(str, self.order))}"

    @property
    def is_contiguous(self) -> bool:
        """Whether the memory order is that of the dimensions."""
        return self.order == tuple(range(len(self.shape)))


# What a number is to PyTorch, by its dtype; a bool is an int, too, so it comes first.
NUMBERS: Mapping[str, type] = {"i1": bool, "i64": int, "f64": float}
# Where MLIR, and so IREE, calls an element type otherwise than we do.
_MLIR_TYPES = {"u8": "i8", "bool": "i1", "c64": "complex<f32>", "c128": "complex<f64>"}


def mlir_type(dtype: str) -> str:
    """Return MLIR's name of a dtype, by its name in `lowering.dtypes`."""
    return _MLIR_TYPES.get(dtype, dtype)


@dataclass(frozen=True)
class ScalarSpec:
    """A Python number that a region takes by value: `i64`, `f64` or `i1`."""

    dtype: str

    def __str__(self) -> str:
        return self.dtype


@dataclass(frozen=True)
class Check:
    """What a call of a region checks of the values that it is given.

    Attributes:
        kind: of eager's error.
        text: what is wrong if it fails, with the op and the user's line.
    """

    kind: CheckKind
    text: str


@dataclass(frozen=True)
class Signature:
    """What a region takes and gives.

    Attributes:
        inputs: arguments of each call, in order.
        parameters: tensors bound once, in order; bound under the names `p0`, `p1`, ...
        outputs: results, in order.
        checks: what a call checks (`lowering.checks`). If it checks anything, it gives one more
            result, an `i64` of no dimension: 0, or the number of the first check that has failed,
            counted from 1; of a check alone, how many values are wrong.
    """

    inputs: tuple[TensorSpec | ScalarSpec, ...]
    parameters: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    checks: tuple[Check, ...] = ()

    def failed(self, number: int) -> Check | None:
        """Return the check that has failed if this is the number that a call has given."""
        return self.checks[min(number, len(self.checks)) - 1] if number else None

    def __str__(self) -> str:
        bound = f" [{len(self.parameters)} bound]" if self.parameters else ""
        return (
            f"({', '.join(map(str, self.inputs))}){bound} -> ({', '.join(map(str, self.outputs))})"
        )


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation that undoes `order`."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))

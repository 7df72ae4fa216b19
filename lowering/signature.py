"""What crosses a region's boundary: dtypes, shapes, memory order; stdlib only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


@dataclass(frozen=True)
class ScalarSpec:
    """A Python number that a region takes by value: `i64`, `f64` or `i1`."""

    dtype: str

    def __str__(self) -> str:
        return self.dtype


@dataclass(frozen=True)
class Signature:
    """What a region takes and gives.

    Attributes:
        inputs: arguments of each call, in order.
        parameters: tensors bound once, in order; bound under the names `p0`, `p1`, ...
        outputs: results, in order.
    """

    inputs: tuple[TensorSpec | ScalarSpec, ...]
    parameters: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def __str__(self) -> str:
        bound = f" [{len(self.parameters)} bound]" if self.parameters else ""
        return (
            f"({', '.join(map(str, self.inputs))}){bound} -> ({', '.join(map(str, self.outputs))})"
        )


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation that undoes `order`."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))

"""The types of tensors: what they say, and how they are written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def sizes_of(kind: Any) -> tuple[int | None, ...]:
    """Return the sizes of a type, None where dynamic; those of no tensor are none."""
    from iree.compiler import ir

    if not isinstance(kind, ir.RankedTensorType):
        return ()
    return tuple(None if kind.is_dynamic_dim(d) else kind.shape[d] for d in range(kind.rank))


def dtype_of(value: Any) -> str:
    """Return the dtype of a tensor, by its name in MLIR."""
    return str(value.type.element_type)


def is_tensor(value: Any) -> bool:
    """Say whether a value is a tensor of one dimension or more."""
    from iree.compiler import ir

    return isinstance(value.type, ir.RankedTensorType) and ir.RankedTensorType(value.type).rank > 0


def floats(*shape: int | None) -> str:
    """Write the type of a tensor of float32."""
    return tensor(shape, "f32")


def tensor(shape: Iterable[int | None], dtype: str) -> str:
    """Write the type of a tensor, of a dtype by its name in MLIR; None: a size is not known."""
    sizes = ("?" if size is None else size for size in shape)
    return f"tensor<{''.join(f'{size}x' for size in sizes)}{dtype}>"

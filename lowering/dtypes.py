"""The one table of element types that cross the boundary, by short names, most of them MLIR's."""

from __future__ import annotations

import torch

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype; one that no device buffer can hold keeps torch's name."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))

"""How the numbers of a row are combined to one, and what changes none of them."""

from __future__ import annotations

# An op on two numbers: what `vector.reduction` calls it.
COMBINERS = {
    "arith.addf": "add",
    "arith.mulf": "mul",
    "arith.maximumf": "maximumf",
    "arith.minimumf": "minimumf",
    "arith.addi": "add",
    "arith.muli": "mul",
    "arith.maxsi": "maxsi",
    "arith.minsi": "minsi",
    "arith.maxui": "maxui",
    "arith.minui": "minui",
    "arith.andi": "and",
    "arith.ori": "or",
}
_OF_FLOATS = {"add": "0.0", "mul": "1.0"}
_INFINITIES = {  # the least, and the largest, as MLIR writes their bits
    "f16": ("0xFC00", "0x7C00"),
    "bf16": ("0xFF80", "0x7F80"),
    "f32": ("0xFF800000", "0x7F800000"),
    "f64": ("0xFFF0000000000000", "0x7FF0000000000000"),
}
_OF_INTEGERS = {"add": 0, "or": 0, "maxui": 0, "mul": 1, "and": -1, "minui": -1}


def neutral(op: str, dtype: str) -> str:
    """Return the number that changes none that an op combines it with, as MLIR writes it."""
    how = COMBINERS[op]
    if dtype.startswith("i"):
        half = 1 << int(dtype[1:]) - 1
        return str({**_OF_INTEGERS, "maxsi": -half, "minsi": half - 1}[how])
    least, largest = _INFINITIES[dtype]
    return {**_OF_FLOATS, "maximumf": least}.get(how, largest)

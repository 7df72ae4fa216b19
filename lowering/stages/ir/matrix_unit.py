"""The CPU's matrix unit: which CPUs have it, and which products it is the faster for."""

from __future__ import annotations

import platform
from collections.abc import Collection

ROWS, COLUMNS = 32, 32  # of a block of the result: two by two tiles
DEPTH = 32  # numbers that one multiplication of tiles adds up
LEAST_HEIGHT = 13  # of a block: a tile takes as long with fewer rows
_FEATURES = frozenset({"amx-tile", "amx-bf16", "avx512bw", "avx512dq"})
# Of a product, where the unit is faster: what is taken apart is used often, and the loop is long.
# The parts of a panel of the greatest depth are 960 KiB, half of the second cache of such CPUs.
_LEAST_ROWS, DEPTHS = 32, range(192, 5121)


def has_tiles(features: Collection[str]) -> bool:
    """Say whether code for a CPU may use its matrix unit, by LLVM's names of what it can do."""
    return frozenset(features) >= _FEATURES and platform.system() == "Linux"


def suits_tiles(rows: int, depth: int) -> bool:
    """Say whether the unit is the faster for a product of so many rows, and so deep."""
    return rows >= _LEAST_ROWS and depth in DEPTHS

"""Have convolutions of images computed in blocks that fill the CPU's registers, or its tiles."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowering.cpu import best_for
from lowering.stages.ir.matrix_unit import (
    COLUMNS,
    DEPTH,
    LEAST_HEIGHT,
    ROWS,
    has_tiles,
    suits_tiles,
)
from lowering.stages.ir.symbols import CONFIG, device_functions, ops_of
from lowering.stages.ir.types import sizes_of
from lowering.stages.ir.work_items import unevenness

# What is read and written: of an image [N, H, W, C], a weight [KH, KW, C, F], and a result.
_LOOPS = "(d0, d1, d2, d3, d4, d5, d6)"
_MAPS = re.compile(
    ", ".join(
        rf"affine_map<{re.escape(_LOOPS)} -> \({dims}\)>"
        for dims in (
            r"d0, d1(?: \* \d+)? \+ d4(?: \* \d+)?, d2(?: \* \d+)? \+ d5(?: \* \d+)?, d6",
            "d4, d5, d6, d3",
            "d0, d1, d2, d3",
        )
    )
)
_VECTORS = re.compile(r"vector_common_parallel = \[([\d, ]+)\]")
# How many places, of one image or several, and features of each, registers hold, by what the CPU
# can do, the first that fits: up to 28 of 32 registers of 16 floats, 12 of 16 of 8; a row of the
# weight needs two more.
_REGISTERS: Mapping[frozenset[str], tuple[range, int] | None] = {
    frozenset({"avx512f"}): (range(4, 15), 32),
    frozenset({"avx2", "fma"}): (range(3, 7), 16),
    frozenset(): None,
}
_ROWS_OF_ANY = 8  # of a work item, of images of any height
_TILES = range(LEAST_HEIGHT, ROWS + 1), COLUMNS


def block_convolutions(module: Any, features: Collection[str]) -> None:
    """Set the sizes of a convolution's loops such that its sums stay in registers.

    A block is some places of one row of an image, and some features of each; a work item is of the
    same features, of several rows. IREE's own blocks have 8 sums of a vector each, for which the
    CPU loads 9 times: ResNet-18 takes 0.90 of the time (a Zen 5). With AVX2, whose registers they
    do not fit, they take three times as long.

    Where rows are narrow, a block is of one row of each of several images. So it is for gradients
    of weights, which are convolutions with 3x3 places in the result, where IREE's blocks are of 3
    places (64 channels and features, 4 images of 56x56: 4.5 ms instead of 7.7, a Zen 4).

    Where the CPU has a matrix unit, and it is the faster, blocks are as high as its tiles, and
    `multiply_tiles` finds a product in them.

    Before: a convolution of 28x28 places, 128 features, whose vectors are of [1, 1, 7, 16]
    After:  the same with vectors of [1, 1, 14, 32] (for tiles, of [1, 1, 28, 32]), and work items
            of [1, 14, 28, 32]

    Args:
        module: as IREE's phase `executable-configurations` leaves it.
        features: of the CPU that is compiled for, by LLVM's names.
    """
    from iree.compiler import ir

    if best_for(features, _REGISTERS) is None:
        return
    with ir.Location.unknown():
        for function in device_functions(module, "func.func"):
            _block(function, features)


def _block(function: Any, features: Collection[str]) -> None:
    from iree.compiler import ir

    ops = [op for op in ops_of(function) if CONFIG in op.attributes]
    blocks = [block for op in ops if (block := _block_of(op, features)) is not None]
    if len(blocks) != 1:
        return
    (block,) = blocks
    for op in ops:
        if (config := block.config(str(op.attributes[CONFIG]))) is not None:
            op.attributes[CONFIG] = ir.Attribute.parse(config)


@dataclass(frozen=True)
class _Block:
    """How a convolution is computed.

    Attributes:
        before: how IREE would make its vectors: sizes of N, H, W, F.
        vectors: the same in a block: of several images or one, of one row, of some of its places.
        item: the same in a work item.
    """

    before: str
    vectors: Sequence[int]
    item: Sequence[int]

    def config(self, before: str) -> str | None:
        """Write the sizes of loops of an op that has these now; None: they stay."""
        found = _VECTORS.search(before)
        if found is None or not found[1].startswith(self.before):
            return None
        parallel, item = (", ".join(map(str, sizes)) for sizes in (self.vectors, self.item))
        if found[1] == self.before:  # what begins with the sums, or goes on with them
            return f"#iree_cpu.lowering_config<vector_common_parallel = [{parallel}]>"
        return (
            "#iree_cpu.lowering_config<"
            f"distribution = [{item}, 0, 0, 0], "
            f"vector_common_parallel = [{parallel}, 0, 0, 0], "
            "vector_reduction = [0, 0, 0, 0, 1, 1, 1]>"
        )


def _block_of(op: Any, features: Collection[str]) -> _Block | None:
    """Return how an op is computed in blocks; None if it is no convolution, or they do not fit."""
    from iree.compiler import ir

    maps = op.attributes.get("indexing_maps", ())
    if not _MAPS.fullmatch(", ".join(map(str, maps))):
        return None
    kinds = [ir.RankedTensorType(operand.type) for operand in op.operands]
    if not all(str(k.element_type) == "f32" for k in kinds):
        return None
    weight, result = (sizes_of(kind) for kind in kinds[1:])
    vectors = _VECTORS.search(str(op.attributes[CONFIG]))
    size = _size_of(weight, result, features)
    if size is None or vectors is None:
        return None
    images, width, columns = size
    return _Block(
        before=", ".join(vectors[1].split(", ")[:4]),
        vectors=(images, 1, width, columns),
        item=(*_item(result, images, columns), result[2] or 0, columns),
    )


def _item(result: Sequence[int | None], images: int, columns: int) -> tuple[int, int]:
    """Return how many images and rows a work item has: such that all workers have as much to do.

    Args:
        result: sizes of N, H, W, F.
        images: of a block.
        columns: features of a block, and of a work item.
    """
    count, height, _, made = result
    if height is None:
        return 1, _ROWS_OF_ANY
    rows = (count or 1) * height * ((made or 0) // columns)  # all there are
    if images == 1:
        items = [(1, d) for d in range(1, height + 1) if height % d == 0]
    else:
        items = [(d, 1) for d in range(images, rows + 1, images) if (count or 1) % d == 0]

    def cost(item: tuple[int, int]) -> tuple[float, int]:
        size = math.prod(item)
        return unevenness([size] * (rows // size)), -size

    return min(items, key=cost)


def _size_of(
    weight: Sequence[int | None], result: Sequence[int | None], features: Collection[str]
) -> tuple[int, int, int] | None:
    """Return how many images, places of each, and features a block has; None: none is whole."""
    known = [size for size in (*weight, *result[2:]) if size is not None]
    if len(known) < 6:
        return None
    *window, channels, _, places, made = known
    count, height, *_ = result
    depth = math.prod(window) * channels
    options = [best_for(features, _REGISTERS)]
    if (
        has_tiles(features)
        and count is not None
        and height is not None
        and channels % DEPTH == 0
        and suits_tiles(count * height * places, depth)
    ):
        options.insert(0, _TILES)
    for rows, columns in filter(None, options):
        widths = [width for width in range(1, rows[-1] + 1) if places % width == 0]
        is_of_one = (rows, columns) == _TILES or count is None or height is None
        most = 1 if is_of_one else rows[-1]
        whole = [
            (images, width)
            for images in range(1, most + 1)
            for width in widths
            if images * width in rows and (count or 1) % images == 0
        ]
        if whole and made % columns == 0:
            return *max(whole, key=lambda block: (math.prod(block), block[1])), columns
    return None

"""How convolutions of images are written in blocks that registers hold, and marked so."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowering.stages.ir.tensors import reshaped, squeezed

DENSE, IN_GROUPS = "linalg.conv_2d_nchw_fchw", "linalg.conv_2d_ngchw_gfchw"
# Beside an op that was marked, by `Mark`.
MARK = "npu_iree.convolution"
# How many images, and features of each, registers hold, by what the CPU can do, the first that
# fits: up to 24 of 32 registers of 16 floats, 12 of 16 of 8; a row of the weight needs two more,
# or one.
BLOCKS: Mapping[frozenset[str], Sequence[tuple[range, int]]] = {
    frozenset({"avx512f"}): ((range(4, 13), 32), (range(4, 25), 16)),
    frozenset({"avx2", "fma"}): ((range(3, 7), 16), (range(3, 13), 8)),
    frozenset(): (),
}
# The same of places of a row, at most, instead of images.
BLOCKS_OF_A_ROW: Mapping[frozenset[str], Sequence[tuple[int, int]]] = {
    frozenset({"avx512f"}): ((12, 32), (24, 16), (24, 8), (24, 4)),
    frozenset({"avx2", "fma"}): ((6, 16), (12, 8), (12, 4)),
    frozenset(): (),
}


@dataclass(frozen=True)
class Mark:
    """What is known of a marked convolution, beside what its loops say.

    Attributes:
        images: how many are computed at a time.
        places: of a row, the same; of one image or several, one of both is 1.
        stride, dilation: of rows and of columns.
        padding: rows, then columns, of zeros before and after the images that it reads.
    """

    images: int
    places: int
    stride: Sequence[int]
    dilation: Sequence[int]
    padding: Sequence[Sequence[int]]

    @classmethod
    def of(cls, op: Any) -> Mark | None:
        """Read that of an op; None if it has none."""
        if MARK not in op.attributes:
            return None
        images, places, *numbers = (int(number) for number in op.attributes[MARK])
        stride, dilation, *padding = (numbers[i : i + 2] for i in range(0, len(numbers), 2))
        return cls(images, places, stride, dilation, padding)

    def __str__(self) -> str:
        block = self.images, self.places
        numbers = [*block, *self.stride, *self.dilation, *itertools.chain(*self.padding)]
        return f"array<i64: {', '.join(map(str, numbers))}>"


def without_ones(images: Any) -> Any:
    """Return images with channels last; one of them as `[H, W, C]`, those of one channel without C.

    IREE takes dimensions of one element out of device programs, and what marks an op with them.
    """
    return squeezed(images, [0, 3])


def with_count(images: Any, count: int | None) -> Any:
    """Return what is of so many images, and of several features, as `[N, H, W, C]`."""
    one = [[0, 1], [2], [3]]
    return reshaped(images, [1, *images.type.shape], one) if count == 1 else images

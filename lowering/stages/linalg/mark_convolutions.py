"""Write convolutions of several images such that each weight that is loaded serves all of these."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowering.cpu import best_for
from lowering.stages.ir.barrier import behind_barrier
from lowering.stages.ir.factors import is_weight, shapes_of
from lowering.stages.ir.matrix_unit import has_tiles
from lowering.stages.ir.structured import is_zeros
from lowering.stages.ir.symbols import constant_of, inside, maker_of, ops_of
from lowering.stages.ir.templates import put
from lowering.stages.ir.tensors import TO_FIRST, TO_LAST, padded, reordered
from lowering.stages.ir.types import floats

# Beside an op that was marked, by `Mark`.
MARK = "npu_iree.convolution"
# How many images, and features of each, registers hold, by what the CPU can do, the first that
# fits: up to 24 of 32 registers of 16 floats, 12 of 16 of 8; a row of the weight needs two more,
# or one.
_BLOCKS: Mapping[frozenset[str], Sequence[tuple[range, int]]] = {
    frozenset({"avx512f"}): ((range(4, 13), 32), (range(4, 25), 16)),
    frozenset({"avx2", "fma"}): ((range(3, 7), 16), (range(3, 13), 8)),
    frozenset(): (),
}
_ZERO = """
func.func private @zero() -> f32 {
  %zero = arith.constant 0.0 : f32
  return %zero : f32
}
"""
_SUM = """
func.func private @sum(%x: {y}, %start: {start}) -> {y} {{
  %empty = tensor.empty() : {y}
  %sum = linalg.generic {{
      indexing_maps = [affine_map<(n, h, w, f) -> (n, h, w, f)>,
                       affine_map<(n, h, w, f) -> ({read})>,
                       affine_map<(n, h, w, f) -> (n, h, w, f)>],
      iterator_types = ["parallel", "parallel", "parallel", "parallel"]}}
      ins(%x, %start : {y}, {start}) outs(%empty : {y}) {{
  ^bb0(%a: f32, %b: f32, %unused: f32):
    %ab = arith.addf %a, %b : f32
    linalg.yield %ab : f32
  }} -> {y}
  return %sum : {y}
}}
"""
_PACK = """
func.func private @pack(%w: {w}) -> {panels} {{
  %empty = tensor.empty() : {panels}
  %panels = linalg.pack %w outer_dims_perm = [0, 2, 3, 1] inner_dims_pos = [0]
      inner_tiles = [{columns}] into %empty : {w} -> {panels}
  return %panels : {panels}
}}
"""
# {g} are the panels: if there is one, it is no dimension.
_CONVOLUTION = """
func.func private @convolution(%x: {x}, %panels: {panels}) -> {parts} {{
  %zero = arith.constant 0.0 : f32
  %unset = tensor.empty() : {parts}
  %zeros = linalg.fill ins(%zero : f32) outs(%unset : {parts}) -> {parts}
  %sums = linalg.generic {{
      indexing_maps = [affine_map<(n, h, w, {g}f, i, j, c) -> (n, {row}, {column}, c)>,
                       affine_map<(n, h, w, {g}f, i, j, c) -> ({g}i, j, c, f)>,
                       affine_map<(n, h, w, {g}f, i, j, c) -> (n, h, w, {g}f)>],
      iterator_types = [{parallel}, "reduction", "reduction", "reduction"]}}
      ins(%x, %panels : {x}, {panels}) outs(%zeros : {parts}) attrs = {{{mark}}} {{
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %ab = arith.mulf %a, %b : f32
    %next = arith.addf %sum, %ab : f32
    linalg.yield %next : f32
  }} -> {parts}
  return %sums : {parts}
}}
"""
_MERGED = """
func.func private @merged(%parts: {parts}) -> {y} {{
  %y = tensor.collapse_shape %parts [[0], [1], [2], [3, 4]] : {parts} into {y}
  return %y : {y}
}}
"""


@dataclass(frozen=True)
class Mark:
    """What is known of a marked convolution, beside what its loops say.

    Attributes:
        images: how many are computed at a time.
        stride, dilation: of rows and of columns.
        padding: rows, then columns, of zeros before and after the images that it reads.
    """

    images: int
    stride: Sequence[int]
    dilation: Sequence[int]
    padding: Sequence[Sequence[int]]

    @classmethod
    def of(cls, op: Any) -> Mark | None:
        """Read that of an op; None if it has none."""
        if MARK not in op.attributes:
            return None
        images, *numbers = (int(number) for number in op.attributes[MARK])
        stride, dilation, *padding = (numbers[i : i + 2] for i in range(0, len(numbers), 2))
        return cls(images, stride, dilation, padding)

    def __str__(self) -> str:
        numbers = [self.images, *self.stride, *self.dilation, *itertools.chain(*self.padding)]
        return f"array<i64: {', '.join(map(str, numbers))}>"


def mark_convolutions(function: Any, features: Collection[str]) -> None:
    """Write convolutions of several images with channels last, their weights in panels.

    The registers hold a number of features of the same place of several images, for which a row of
    the panel is loaded once; no place beside it is needed, so that a place at the edge can leave
    out what it would see of the padding (`lowering.stages.flow.skip_padding`, once device programs
    are formed, and what follows is in them). Weights are packed once, at load.

    Both stand apart from what makes them: the loops read them where they lie.

    A convolution of one image, or of a number of them that no block has, stays as it is
    (`lowering.stages.code.block_convolutions`), and where the CPU has a matrix unit, they all do.

    Before: %p = tensor.pad %x; %y = linalg.conv_2d_nchw_fchw ins(%p, %w)
    After:  %l = transpose %x [0, 2, 3, 1]; %p = tensor.pad %l
            %panels[g, i, j, c, f] = %w[32 * g + f, c, i, j]         (or 16; one panel is no g)
            %sums[n, h, w, g, f] = sum over i, j, c of
                %p[n, stride * h + i, stride * w + j, c] * %panels[g, i, j, c, f]
            %y = transpose %sums[n, h, w, 32 * g + f] [0, 3, 1, 2]

    Args:
        function: an entry point; its parameters are loads of globals.
        features: of the CPU that is compiled for, by LLVM's names.
    Source: that each work item is of one place, and of a few features of several images, is as in
        the blocked direct convolutions of E. Georganas et al., "Anatomy of High-Performance Deep
        Learning Convolutions on SIMD Architectures" (2018), with images in the place of columns.
    """
    from iree.compiler import ir

    blocks = () if has_tiles(features) else best_for(features, _BLOCKS)
    for op in inside(function, "linalg.conv_2d_nchw_fchw"):
        if (convolution := _convolution_of(op, blocks)) is not None:
            with ir.InsertionPoint(op), op.operation.location:
                _replace(op.operation, convolution.write())


def _replace(op: Any, last: Any) -> None:
    """Let all have a result with channels last that read it with channels first.

    What puts them last itself reads it as it is: IREE could not, since a product that something
    transposes has a barrier behind it (`lowering.stages.linalg.read_in_panels`).
    """
    (result,) = op.results
    for user in [use.owner.operation for use in result.uses]:
        if _is_transpose(user, TO_LAST):
            user.results[0].replace_all_uses_with(last)
            user.erase()
    if any(True for _ in result.uses):
        result.replace_all_uses_with(reordered(last, TO_FIRST))
    op.erase()


def _is_transpose(op: Any, order: Sequence[int]) -> bool:
    is_transpose = getattr(op, "name", "") == "linalg.transpose"
    return is_transpose and list(op.attributes["permutation"]) == order


@dataclass(frozen=True)
class _Convolution:
    """A convolution of images of known sizes.

    Attributes:
        image: of channels first, without what it is padded with.
        weight: `[F, C, KH, KW]`.
        start: what the sums begin with, of channels first.
        made: N, H, W, F.
        columns: features at a time.
        mark: everything else.
    """

    image: Any
    weight: Any
    start: Any
    made: Sequence[int]
    columns: int
    mark: Mark

    def write(self) -> Any:
        """Write it at the insertion point; return its result, `[N, H, W, F]`."""
        image = behind_barrier(self._padded(_with_channels_last(self.image)))
        panels = self._panels()
        (sums,) = put(self._text(image, panels), [image, panels])
        if self._count > 1:
            (sums,) = put(_MERGED.format(parts=sums.type, y=floats(*self.made)), [sums])
        if is_zeros(self.start):
            return sums
        bias = _bias_of(self.start)
        if bias is not None:
            read, start = "f", bias
        else:
            read, start = "n, h, w, f", _with_channels_last(self.start)
        text = _SUM.format(y=sums.type, start=start.type, read=read)
        (whole,) = put(text, [sums, start])
        return whole

    def _padded(self, image: Any) -> Any:
        """Pad images with channels last."""
        low, high = ([0, *amounts, 0] for amounts in zip(*self.mark.padding, strict=True))
        if not any([*low, *high]):
            return image
        return padded(image, low, high, *put(_ZERO, []))

    @property
    def _count(self) -> int:
        """How many panels there are."""
        return int(self.made[-1]) // self.columns

    def _panels(self) -> Any:
        """Lay out the weight as `[G, KH, KW, C, 32]`, or as `[KH, KW, C, F]`."""
        if self._count > 1:
            _, channels, *kernel = self.weight.type.shape
            shape = self._count, *kernel, channels, self.columns
            text = _PACK.format(w=self.weight.type, panels=floats(*shape), columns=self.columns)
            (panels,) = put(text, [self.weight])
        else:
            panels = reordered(self.weight, [2, 3, 1, 0])
        return panels if is_weight(self.weight) else behind_barrier(panels)

    def _text(self, image: Any, panels: Any) -> str:
        *places, _ = self.made
        panels_there = [self._count] if self._count > 1 else []
        row, column = (
            f"{there} * {step} + {place} * {apart}"
            for there, place, step, apart in zip(
                "hw", "ij", self.mark.stride, self.mark.dilation, strict=True
            )
        )
        return _CONVOLUTION.format(
            x=image.type,
            panels=panels.type,
            parts=floats(*places, *panels_there, self.columns),
            g="g, " if panels_there else "",
            parallel=", ".join(['"parallel"'] * (4 + len(panels_there))),
            row=row,
            column=column,
            mark=f"{MARK} = {self.mark}",
        )


def _convolution_of(op: Any, blocks: Sequence[tuple[range, int]]) -> _Convolution | None:
    """Read a convolution off; None if it is not written anew."""
    if (shapes := shapes_of(op)) is None:
        return None
    (count, *_), (features, channels, *kernel), (*_, height, width) = shapes
    block = next(
        (
            (max(n for n in at_a_time if count % n == 0), columns)
            for at_a_time, columns in blocks
            if features % columns == 0 and any(count % n == 0 for n in at_a_time)
        ),
        None,
    )
    # IREE takes dimensions of one element out of device programs.
    if block is None or min(*kernel, height, width, channels) < 2:
        return None
    if math.prod(kernel) > height * width:  # the gradient of a weight, whose blocks are others
        return None
    image, weight, start = op.operands
    padding = _padding_of(image)
    return _Convolution(
        image=image if padding is None else image.owner.operands[0],
        weight=weight,
        start=start,
        made=[count, height, width, features],
        columns=block[1],
        mark=Mark(
            images=block[0],
            stride=[int(n) for n in op.attributes["strides"]],
            dilation=[int(n) for n in op.attributes["dilations"]],
            padding=padding or [(0, 0), (0, 0)],
        ),
    )


def _padding_of(value: Any) -> list[tuple[int, int]] | None:
    """Return how many rows and columns of zeros images with channels first have before and after.

    None: they are not padded, or not so.
    """
    if maker_of(value) != "tensor.pad" or len(value.owner.operands) > 1:
        return None
    *_, end = ops_of(value.owner)
    low, high = (list(value.owner.attributes[f"static_{name}"]) for name in ("low", "high"))
    is_of_places = not any([*low[:2], *high[:2]]) and min(*low, *high) >= 0
    if not is_of_places or constant_of(end.operands[0]) != 0:
        return None
    return [(low[2], high[2]), (low[3], high[3])]


def _with_channels_last(value: Any) -> Any:
    """Give images of channels first with these last."""
    if _is_transpose(value.owner, TO_FIRST):
        return value.owner.operands[0]
    return reordered(value, TO_LAST)


def _bias_of(value: Any) -> Any:
    """Return the numbers, one for each feature, that images have everywhere; None: others."""
    if maker_of(value) != "linalg.broadcast":
        return None
    is_bias = list(value.owner.attributes["dimensions"]) == [0, 2, 3]
    return value.owner.operands[0] if is_bias else None

"""Write convolutions of several images such that each weight that is loaded serves all of these."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from lowering.cpu import best_for
from lowering.stages.ir.barrier import behind_barrier
from lowering.stages.ir.convolutions import (
    BLOCKS,
    BLOCKS_IN_GROUPS,
    DENSE,
    IN_GROUPS,
    MARK,
    Mark,
    with_count,
    without_count,
)
from lowering.stages.ir.factors import is_weight, shapes_of
from lowering.stages.ir.matrix_unit import has_tiles
from lowering.stages.ir.structured import is_zeros
from lowering.stages.ir.symbols import constant_of, inside, maker_of, ops_of
from lowering.stages.ir.templates import put
from lowering.stages.ir.tensors import TO_FIRST, TO_LAST, padded, reordered, reshaped
from lowering.stages.ir.types import dtype_of, floats, sizes_of

_ZERO = """
func.func private @zero() -> f32 {
  %zero = arith.constant 0.0 : f32
  return %zero : f32
}
"""
_SUM = """
func.func private @sum(%x: {y}, %start: {start}) -> {y} {{
  %first = arith.constant 0 : index
  %n = tensor.dim %x, %first : {y}
  %empty = tensor.empty({unknown}) : {y}
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
# {n} are the images and {g} the panels: if there is one, it is no dimension.
_CONVOLUTION = """
func.func private @convolution(%x: {x}, %panels: {panels}) -> {parts} {{
  %first = arith.constant 0 : index
  %n = tensor.dim %x, %first : {x}
  %zero = arith.constant 0.0 : f32
  %unset = tensor.empty({unknown}) : {parts}
  %zeros = linalg.fill ins(%zero : f32) outs(%unset : {parts}) -> {parts}
  %sums = linalg.generic {{
      indexing_maps = [affine_map<({n}h, w, {g}f, i, j, c) -> ({n}{row}, {column}, {channel}c)>,
                       affine_map<({n}h, w, {g}f, i, j, c) -> ({g}i, j, c, f)>,
                       affine_map<({n}h, w, {g}f, i, j, c) -> ({n}h, w, {g}f)>],
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


def mark_convolutions(function: Any, features: Collection[str]) -> None:
    """Write convolutions of several images with channels last, their weights in panels.

    The registers hold a number of features of the same place of several images, for which a row of
    the panel is loaded once; no place beside it is needed, so that a place at the edge can leave
    out what it would see of the padding (`lowering.stages.flow.skip_padding`, once device programs
    are formed, and what follows is in them). Weights are packed once, at load.

    Both stand apart from what makes them: the loops read them where they lie.

    A convolution of one image, or of a number of them that no block has, stays as it is
    (`lowering.stages.code.block_convolutions`), and where the CPU has a matrix unit, they all do.

    In groups, a panel has features of one group, and the registers hold those of several places of
    a row: IREE computes these number by number (4 groups of 16 channels, two images of 28x28: 0.46
    ms instead of 7; eager 0.33; two cores of an EPYC, Zen 3).

    Before: %p = tensor.pad %x; %y = linalg.conv_2d_nchw_fchw ins(%p, %w)
    After:  %l = transpose %x [0, 2, 3, 1]; %p = tensor.pad %l
            %panels[g, i, j, c, f] = %w[32 * g + f, c, i, j]         (or 16; one panel is no g)
            %sums[n, h, w, g, f] = sum over i, j, c of
                %p[n, stride * h + i, stride * w + j, c] * %panels[g, i, j, c, f]
            %y = transpose %sums[n, h, w, 32 * g + f] [0, 3, 1, 2]
    In groups of 8 channels, and of 16 features, panels of 8:
            %sums[n, h, w, g, f] = sum over i, j, c of
                %p[n, stride * h + i, stride * w + j, 8 * (g floordiv 2) + c] * %panels[...]

    Args:
        function: an entry point; its parameters are loads of globals.
        features: of the CPU that is compiled for, by LLVM's names.
    Source: that each work item is of one place, and of a few features of several images, is as in
        the blocked direct convolutions of E. Georganas et al., "Anatomy of High-Performance Deep
        Learning Convolutions on SIMD Architectures" (2018), with images in the place of columns.
    """
    from iree.compiler import ir

    for kind, reads in ((DENSE, _of_images), (IN_GROUPS, _in_groups)):
        for op in inside(function, kind):
            if (convolution := reads(op, features)) is not None:
                with ir.InsertionPoint(op), op.operation.location:
                    _replace(convolution.op, convolution.write())


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
    """A convolution of images of known sizes, in groups of any number of images.

    Attributes:
        op: whose result it is.
        image: of channels first, without what it is padded with.
        weight: `[F, C / groups, KH, KW]`.
        start: what the sums begin with, of channels first.
        made: N, which may not be known, H, W, F.
        columns: features at a time.
        groups: of features, each of which sees channels of its own.
        mark: everything else.
    """

    op: Any
    image: Any
    weight: Any
    start: Any
    made: tuple[int | None, int, int, int]
    columns: int
    groups: int
    mark: Mark

    def write(self) -> Any:
        """Write it at the insertion point; return its result, `[N, H, W, F]`."""
        padded_image = self._padded(_with_channels_last(self.image))
        image = without_count(behind_barrier(padded_image))
        panels = self._panels()
        (sums,) = put(self._text(image, panels), [image, panels])
        if self._count > 1:
            *places, _, _ = sizes_of(sums.type)
            dims = [[d] for d, _ in enumerate(places)]
            panels_of = [len(places), len(places) + 1]
            sums = reshaped(sums, [*places, self.made[-1]], [*dims, panels_of])
        sums = with_count(sums, self.made[0])
        if is_zeros(self.start):
            return sums
        bias = _bias_of(self.start)
        if bias is not None:
            read, start = "f", bias
        else:
            read, start = "n, h, w, f", _with_channels_last(self.start)
        text = _SUM.format(y=sums.type, start=start.type, read=read, unknown=self._unknown)
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

    @property
    def _unknown(self) -> str:
        """The name of the size that is not known, if there is one."""
        return "%n" if self.made[0] is None else ""

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
        count, *places, _ = self.made
        images_there = [count] if count != 1 else []
        panels_there = [self._count] if self._count > 1 else []
        parallel = [*images_there, *places, *panels_there, self.columns]
        of_group = self._count // self.groups
        first = f"(g floordiv {of_group}) * {panels.type.shape[-2]} + "
        row, column = (
            f"{there} * {step} + {place} * {apart}"
            for there, place, step, apart in zip(
                "hw", "ij", self.mark.stride, self.mark.dilation, strict=True
            )
        )
        return _CONVOLUTION.format(
            x=image.type,
            panels=panels.type,
            parts=floats(*parallel),
            unknown=self._unknown,
            n="n, " if images_there else "",
            g="g, " if panels_there else "",
            channel=first if self.groups > 1 else "",
            parallel=", ".join('"parallel"' for _ in parallel),
            row=row,
            column=column,
            mark=f"{MARK} = {self.mark}",
        )


def _of_images(op: Any, features: Collection[str]) -> _Convolution | None:
    """Read a convolution of several images off; None if it is not written anew."""
    if (shapes := shapes_of(op)) is None:
        return None
    (count, *_), (made, *_), _ = shapes
    blocks = () if has_tiles(features) else best_for(features, BLOCKS)
    block = next(
        (
            (max(n for n in at_a_time if count % n == 0), columns)
            for at_a_time, columns in blocks
            if made % columns == 0 and any(count % n == 0 for n in at_a_time)
        ),
        None,
    )
    if block is None:
        return None
    images, columns = block
    return _convolution_of(op, (op.operation, *op.operands), 1, (images, 1), columns)


def _in_groups(op: Any, features: Collection[str]) -> _Convolution | None:
    """Read a convolution in groups off; None if it is not written anew."""
    shapes: Any = [sizes_of(operand.type) for operand in op.operands]
    if any(None in of[1:] for of in shapes) or {*map(dtype_of, op.operands)} != {"f32"}:
        return None
    _, (groups, made, *_), (*_, width) = shapes
    for most, columns in best_for(features, BLOCKS_IN_GROUPS):
        places = max(n for n in range(1, most + 1) if width % n == 0)
        if made % columns == 0 and places > 1:
            break
    else:
        return None
    readers = [use.owner.operation for use in op.operation.results[0].uses]
    image, weight, start = map(_merged, op.operands)
    if [reader.name for reader in readers] != ["tensor.collapse_shape"]:
        return None
    if image is None or weight is None:
        return None
    if start is None and is_zeros(op.operands[2]):
        start = op.operands[2]
    elif start is None:
        return None
    return _convolution_of(op, (*readers, image, weight, start), groups, (1, places), columns)


def _merged(value: Any) -> Any:
    """Return a tensor without a dimension of groups; None: there is no such tensor."""
    return value.owner.operands[0] if maker_of(value) == "tensor.expand_shape" else None


def _convolution_of(
    op: Any,
    values: Sequence[Any],
    groups: int,
    block: tuple[int, int],
    columns: int,
) -> _Convolution | None:
    """Return a convolution that is written in blocks; None: it is none of images.

    Args:
        op: the convolution.
        values: the op whose result it is; the images, the weight, and what the sums begin with.
        groups: of it.
        block: images and places at a time.
        columns: features at a time.
    """
    result, image, weight, start = values
    sizes: Any = sizes_of(result.results[0].type)
    count, features, height, width = sizes
    _, channels, *kernel = weight.type.shape
    # IREE takes dimensions of one element out of device programs.
    if min(*kernel, height, width, channels) < 2:
        return None
    if math.prod(kernel) > height * width:  # the gradient of a weight, whose blocks are others
        return None
    padding = _padding_of(image)
    return _Convolution(
        op=result,
        image=image if padding is None else image.owner.operands[0],
        weight=weight,
        start=start,
        made=(count, height, width, features),
        columns=columns,
        groups=groups,
        mark=Mark(
            *block,
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

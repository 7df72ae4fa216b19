"""Write a convolution of images in blocks that registers hold, with channels last, and mark it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowering.stages.ir.barrier import behind_barrier
from lowering.stages.ir.convolutions import MARK, Mark, with_count, without_ones
from lowering.stages.ir.factors import is_weight
from lowering.stages.ir.structured import is_transpose, is_zeros
from lowering.stages.ir.symbols import maker_of
from lowering.stages.ir.templates import put
from lowering.stages.ir.tensors import TO_FIRST, TO_LAST, padded, reordered, reshaped, squeezed
from lowering.stages.ir.types import floats, sizes_of, tensor

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
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : {panels}
  %panels = linalg.pack %w {padding} outer_dims_perm = [0, 2, 3, 1] inner_dims_pos = [0]
      inner_tiles = [{columns}] into %empty : {w} -> {panels}
  return %panels : {panels}
}}
"""
_FIRST = """
func.func private @first(%x: {x}) -> {y} {{
  %dim = arith.constant 0 : index
  %n = tensor.dim %x, %dim : {x}
  %y = tensor.extract_slice %x[0, 0, 0, 0] [{count}, {sizes}] [1, 1, 1, 1] : {x} to {y}
  return %y : {y}
}}
"""
# {n} are the images, {g} the panels and {c} the channels: if there is one, it is no dimension.
_CONVOLUTION = """
func.func private @convolution(%x: {x}, %panels: {panels}) -> {parts} {{
  %first = arith.constant 0 : index
  %n = tensor.dim %x, %first : {x}
  %zero = arith.constant 0.0 : f32
  %unset = tensor.empty({unknown}) : {parts}
  %zeros = linalg.fill ins(%zero : f32) outs(%unset : {parts}) -> {parts}
  %sums = linalg.generic {{
      indexing_maps = [affine_map<({n}h, w, {g}f, i, j{c}) -> ({n}{row}, {column}{channel})>,
                       affine_map<({n}h, w, {g}f, i, j{c}) -> ({g}i, j{c}, f)>,
                       affine_map<({n}h, w, {g}f, i, j{c}) -> ({n}h, w, {g}f)>],
      iterator_types = [{parallel}, {reductions}]}}
      ins(%x, %panels : {x}, {panels}) outs(%zeros : {parts}) attrs = {{{mark}}} {{
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %ab = arith.mulf %a, %b : f32
    %next = arith.addf %sum, %ab : f32
    linalg.yield %next : f32
  }} -> {parts}
  return %sums : {parts}
}}
"""


@dataclass(frozen=True)
class BlockedConvolution:
    """A convolution of images of known sizes; in blocks of a row, of any number of them.

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
        image = without_ones(behind_barrier(padded_image))
        panels = self._panels()
        (sums,) = put(self._text(image, panels), [image, panels])
        if self._count > 1:
            *places, _, _ = sizes_of(sums.type)
            dims = [[d] for d, _ in enumerate(places)]
            panels_of = [len(places), len(places) + 1]
            sums = reshaped(sums, [*places, self._count * self.columns], [*dims, panels_of])
        sums = self._without_padding(with_count(sums, self.made[0]))
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

    def _without_padding(self, sums: Any) -> Any:
        """Return those of the features that there are, `[N, H, W, F]`."""
        if not self._is_padded:
            return sums
        count, *sizes = self.made
        text = _FIRST.format(
            x=sums.type,
            y=tensor(self.made, "f32"),
            count="%n" if count is None else count,
            sizes=", ".join(map(str, sizes)),
        )
        (features,) = put(text, [sums])
        return features

    @property
    def _count(self) -> int:
        """How many panels there are."""
        return -(-self.made[-1] // self.columns)

    @property
    def _is_padded(self) -> bool:
        """Whether the last panel has columns over."""
        return self.made[-1] % self.columns != 0

    @property
    def _unknown(self) -> str:
        """The name of the size that is not known, if there is one."""
        return "%n" if self.made[0] is None else ""

    def _panels(self) -> Any:
        """Lay out the weight as `[G, KH, KW, C, 32]`, or as `[KH, KW, C, F]`; one C is none."""
        _, channels, *kernel = self.weight.type.shape
        if self._count > 1 or self._is_padded:
            shape = self._count, *kernel, channels, self.columns
            text = _PACK.format(
                w=self.weight.type,
                panels=floats(*shape),
                columns=self.columns,
                padding="padding_value(%zero : f32)" if self._is_padded else "",
            )
            (panels,) = put(text, [self.weight])
        else:
            panels = reordered(self.weight, [2, 3, 1, 0])
        rank = len(panels.type.shape)
        panels = squeezed(panels, [*range(rank - 4), rank - 2])
        return panels if is_weight(self.weight) else behind_barrier(panels)

    def _text(self, image: Any, panels: Any) -> str:
        count, *places, _ = self.made
        images_there = [count] if count != 1 else []
        panels_there = [self._count] if self._count > 1 else []
        parallel = [*images_there, *places, *panels_there, self.columns]
        channels = self.weight.type.shape[1]
        c = ", c" if channels > 1 else ""
        row, column = (
            f"{there} * {step} + {place} * {apart}"
            for there, place, step, apart in zip(
                "hw", "ij", self.mark.stride, self.mark.dilation, strict=True
            )
        )
        group = f", (g floordiv {self._count // self.groups}) * {channels}" + " + c" * bool(c)
        return _CONVOLUTION.format(
            x=image.type,
            panels=panels.type,
            parts=floats(*parallel),
            unknown=self._unknown,
            n="n, " if images_there else "",
            g="g, " if panels_there else "",
            c=c,
            channel=group if self.groups > 1 else c,
            parallel=", ".join('"parallel"' for _ in parallel),
            reductions=", ".join(['"reduction"'] * (3 if c else 2)),
            row=row,
            column=column,
            mark=f"{MARK} = {self.mark}",
        )


def _with_channels_last(value: Any) -> Any:
    """Give images of channels first with these last."""
    if is_transpose(value.owner, TO_FIRST):
        return value.owner.operands[0]
    return reordered(value, TO_LAST)


def _bias_of(value: Any) -> Any:
    """Return the numbers, one for each feature, that images have everywhere; None: others."""
    if maker_of(value) != "linalg.broadcast":
        return None
    is_bias = list(value.owner.attributes["dimensions"]) == [0, 2, 3]
    return value.owner.operands[0] if is_bias else None

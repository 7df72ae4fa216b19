"""What a convolution that was marked reads and makes, and its loops over the places of a window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowering.stages.ir.convolutions import Mark
from lowering.stages.ir.device_programs import is_loaded
from lowering.stages.ir.structured import inputs_of, maps_of
from lowering.stages.ir.templates import tiles_of_product
from lowering.stages.ir.types import floats, sizes_of

# Pixels of one channel are a row of numbers.
_OF_ONE_CHANNEL = """indexing_maps = [affine_map<(m, n, k) -> (k, m)>,
            affine_map<(m, n, k) -> (k, n)>, affine_map<(m, n, k) -> (m, n)>]"""
# Of a work item: a row of some images, for the features of a panel. Returns where that is. A block
# is of a place of all of these images, or of some places of one.
_LOOPS = """
func.func @loops(%xs: {xs}, %ws: {ws}{sizes}) -> (index, index, index) {{
  %zero = arith.constant 0.0 : f32
  %first = arith.constant 0 : index
  %step = arith.constant 1 : index
  %width = arith.constant {width} : index
  %places = arith.constant {places} : index
  %row = flow.dispatch.workgroup.id[0] : index
  %panel = flow.dispatch.workgroup.id[1] : index
  %block = flow.dispatch.workgroup.id[2] : index
  %image = affine.apply affine_map<(d0) -> (d0 * {count})>(%block)
  %above = affine.max affine_map<(d0) -> (0, {above})>(%row)
  %below = affine.min affine_map<(d0) -> ({high}, {below})>(%row)
  %channel = affine.apply affine_map<(d0) -> ((d0 floordiv {of_group}) * {channels})>(%panel)
  scf.for %begin = %first to %width step %places {{
    %column = affine.{column}>(%begin)
    %left = affine.max affine_map<(d0) -> (0, {left})>(%column)
    %right = affine.min affine_map<(d0) -> ({wide}, {right})>(%column)
    %empty = tensor.empty() : {tile}
    %zeros = linalg.fill ins(%zero : f32) outs(%empty : {tile}) -> {tile}
    %sums = scf.for %i = %above to %below step %step iter_args(%before = %zeros) -> ({tile}) {{
      %y = affine.apply affine_map<(d0, d1) -> ({y})>(%row, %i)
      %more = scf.for %j = %left to %right step %step iter_args(%sum = %before) -> ({tile}) {{
        %x = affine.apply affine_map<(d0, d1) -> ({x})>(%column, %j)
        %pixels = iree_tensor_ext.dispatch.tensor.load %xs, offsets = [{image}%y, %x{channel}],
            sizes = [{images}1, {places}{some}], strides = [{each}1, {apart}{near}]
            : {xs}{unknown} -> {pixels}
        %factors = iree_tensor_ext.dispatch.tensor.load %ws, offsets = [{panel}%i, %j{zero}, 0],
            sizes = [{one}1, 1{all}, {columns}], strides = [{one}1, 1{beside}, 1]
            : {ws} -> {factors}
        %next = linalg.matmul {maps} {{compilation_info = {tiles}}}
            ins(%pixels, %factors : {pixels}, {factors}) outs(%sum : {tile}) -> {tile}
        scf.yield %next : {tile}
      }}
      scf.yield %more : {tile}
    }}
  }}
  return %image, %row, %panel : index, index, index
}}
"""


@dataclass(frozen=True)
class MarkedConvolution:
    """A convolution that was marked (`lowering.stages.linalg.mark_convolutions`).

    Attributes:
        op: it.
        mark: what is known of it beside.
    """

    op: Any
    mark: Mark

    @classmethod
    def of(cls, op: Any) -> MarkedConvolution | None:
        """Return that which an op is, of values that are loaded; None if it is none."""
        mark = Mark.of(op)
        if mark is None or not all(map(is_loaded, inputs_of(op))):
            return None
        return cls(op, mark)

    @property
    def made(self) -> tuple[Any, int, int, Sequence[int], int]:
        """How many images, rows, columns, panels (one is no dimension) and features there are."""
        shape: Any = sizes_of(self.op.results[0].type)
        count = [] if self.is_one else [shape[0]]
        height, width, *panels, columns = shape[len(count) :]
        return count[0] if count else 1, height, width, panels, columns

    @property
    def is_of_any_number(self) -> bool:
        """Whether it is not known how many images there are."""
        return self.made[0] is None

    @property
    def is_one(self) -> bool:
        """Whether there is one image, which is no dimension either."""
        _, panels, sums = self._ranks
        return sums + self._sums_channels == panels

    @property
    def _sums_channels(self) -> bool:
        """Whether there are several channels that are summed; one is no dimension."""
        loops: int = maps_of(self.op)[-1].n_dims
        places_of_window = 2
        return loops > self._ranks[-1] + places_of_window

    @property
    def _has_channels(self) -> bool:
        """Whether the images have several channels, of one group or all."""
        images, *_ = self._ranks
        return images > 3 - self.is_one

    @property
    def _ranks(self) -> list[int]:
        """How many dimensions the images, the panels and the result have."""
        return [len(value.type.shape) for value in self.op.operands]

    @property
    def _window(self) -> tuple[Sequence[int], int]:
        """How high and wide a window is, and of how many channels."""
        shape = inputs_of(self.op)[1].type.shape
        return (shape[-4:-2], shape[-2]) if self._sums_channels else (shape[-3:-1], 1)

    @property
    def _sizes(self) -> Sequence[int]:
        """How high and wide the images are that are read."""
        shape = inputs_of(self.op)[0].type.shape
        return shape[-3:-1] if self._has_channels else shape[-2:]  # type: ignore[no-any-return]

    def flops(self, count: int) -> int:
        """Count the multiplications and additions, of so many images."""
        _, height, width, panels, columns = self.made
        kernel, channels = self._window
        mark, steps = self.mark, 2 * count * channels * math.prod(panels) * columns
        for places, window, size, step, apart, (before, after) in zip(
            (height, width),
            kernel,
            self._sizes,
            mark.stride,
            mark.dilation,
            mark.padding,
            strict=True,
        ):
            seen = range(before, size - after)
            steps *= sum(h * step + i * apart in seen for h in range(places) for i in range(window))
        return int(steps)

    def loops(self, images: Any, panels: Any, *, is_padded: bool) -> str:
        """Write its loops: a function of the images, of the panels, and of N where it is not known.

        It returns which image, row and panel the block begins with; what follows is to be put at
        the end of the outer loop.

        Args:
            images: the argument that has them.
            panels: the one that has the weight.
            is_padded: whether the images have their padding around them.
        """
        _, _, width, panels_there, columns = self.made
        kernel, channels = self._window
        all_channels = inputs_of(self.op)[0].type.shape[-1] if self._has_channels else 1
        count, places = self.mark.images, self.mark.places
        return _LOOPS.format(
            sizes=", %n: index" if self.is_of_any_number else "",
            unknown="{%n}" if self.is_of_any_number else "",
            xs=images.type,
            ws=panels.type,
            count=count,
            image="" if self.is_one else "%image, ",
            images="" if self.is_one else f"{count}, ",
            each="" if self.is_one else "1, ",
            places=places,
            apart=self.mark.stride[1] if places > 1 else 1,
            of_group=math.prod(panels_there) * channels // all_channels,
            column="apply affine_map<(d0) -> (d0)"
            if width % places == 0
            else f"min affine_map<(d0) -> (d0, {width - places})",
            channel=", %channel" * self._has_channels,
            some=f", {channels}" * self._has_channels,
            near=", 1" * self._has_channels,
            zero=", 0" * self._sums_channels,
            all=f", {channels}" * self._sums_channels,
            beside=", 1" * self._sums_channels,
            maps="" if self._sums_channels else _OF_ONE_CHANNEL,
            columns=columns,
            channels=channels,
            tiles=tiles_of_product(count * places, columns),
            width=width,
            panel="%panel, " if panels_there else "",
            one="1, " if panels_there else "",
            tile=floats(count * places, columns),
            pixels=floats(*((count * places, channels) if self._sums_channels else (1, places))),
            factors=floats(channels, columns),
            high=kernel[0],
            wide=kernel[1],
            **self._places(kernel[1], is_padded=is_padded),
        )

    def _places(self, wide: int, *, is_padded: bool) -> dict[str, str]:
        """Write which places of a window are inside of the images, and where these are read."""
        begins, ends, reads = list[str](), list[str](), list[str]()
        for size, step, apart, (before, after) in zip(
            self._sizes, self.mark.stride, self.mark.dilation, self.mark.padding, strict=True
        ):
            begins.append(f"({before} - d0 * {step}) ceildiv {apart}")
            ends.append(f"({size - after} - d0 * {step}) ceildiv {apart}")
            skipped = 0 if is_padded else before
            reads.append(f"d0 * {step} + d1 * {apart} - {skipped}")
        if self.mark.places > 1:  # where the window of one is outside of the image, others' are not
            begins[1], ends[1] = "0", str(wide)
        (above, left), (below, right), (y, x) = begins, ends, reads
        return {"above": above, "below": below, "left": left, "right": right, "y": y, "x": x}

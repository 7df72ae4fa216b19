"""Convolve several images, or places, at a time, and only where a window is inside of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowering.stages.flow.tiled_followers import Tile, can_be_tiled, write_tiled
from lowering.stages.ir.convolutions import Mark
from lowering.stages.ir.device_programs import (
    DISPATCH,
    EXECUTABLE,
    EXPORT,
    LOAD,
    STORE,
    argument_type,
    compute_workgroups,
    dispatches_of,
    entries_of,
    entry_of,
    functions_of,
    is_at,
    is_loaded,
    is_whole,
    place_of,
    put_dispatch,
    put_program,
    set_type,
    set_workgroups,
    sizes_in_program,
    tell_flops,
)
from lowering.stages.ir.structured import inputs_of
from lowering.stages.ir.symbols import inside, maker_of, ops_of, symbol_of
from lowering.stages.ir.templates import clones, put, tiles_of_product
from lowering.stages.ir.types import dtype_of, floats, sizes_of

# How many work items there are, of any number of images.
_WORKGROUPS = """
func.func @counts(%n: index) -> (index, index, index) {{
  %rows = arith.constant {rows} : index
  %panels = arith.constant {panels} : index
  return %rows, %panels, %n : index, index, index
}}
"""
# What tells sizes, or is no work.
_KEPT = frozenset(
    {"arith.constant", "flow.dispatch.tie_shape", "iree_tensor_ext.dispatch.workload.ordinal"}
)
# What followers do not compute: they load and make it anew.
_SOURCES = frozenset({"arith.constant", "tensor.empty", "linalg.fill", LOAD})
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
  scf.for %column = %first to %width step %places {{
    %left = affine.max affine_map<(d0) -> (0, {left})>(%column)
    %right = affine.min affine_map<(d0) -> ({wide}, {right})>(%column)
    %empty = tensor.empty() : {tile}
    %zeros = linalg.fill ins(%zero : f32) outs(%empty : {tile}) -> {tile}
    %sums = scf.for %i = %above to %below step %step iter_args(%before = %zeros) -> ({tile}) {{
      %y = affine.apply affine_map<(d0, d1) -> ({y})>(%row, %i)
      %more = scf.for %j = %left to %right step %step iter_args(%sum = %before) -> ({tile}) {{
        %x = affine.apply affine_map<(d0, d1) -> ({x})>(%column, %j)
        %pixels = iree_tensor_ext.dispatch.tensor.load %xs, offsets = [{image}%y, %x, %channel],
            sizes = [{images}1, {places}, {channels}], strides = [{each}1, {apart}, 1]
            : {xs}{unknown} -> {pixels}
        %factors = iree_tensor_ext.dispatch.tensor.load %ws, offsets = [{panel}%i, %j, 0, 0],
            sizes = [{one}1, 1, {channels}, {columns}], strides = [{one}1, 1, 1, 1]
            : {ws} -> {factors}
        %next = linalg.matmul {{compilation_info = {tiles}}}
            ins(%pixels, %factors : {pixels}, {factors}) outs(%sum : {tile}) -> {tile}
        scf.yield %next : {tile}
      }}
      scf.yield %more : {tile}
    }}
  }}
  return %image, %row, %panel : index, index, index
}}
"""


def skip_padding(module: Any) -> None:
    """Write marked convolutions as loops over the places of a window that are inside of an image.

    Or a few places of one image, for convolutions in groups; these skip rows of the padding only.

    IREE's loops over a window are of a known number of steps, and multiply what was padded, too: a
    fifth of what 3x3 windows see of 7x7 images, a tenth of 14x14. What computes on the result in
    the same device program does so tile by tile; where it cannot, it gets one of its own. An image
    that was only copied to be padded is read as it is, and not copied.

    ResNet-18 takes 131 ms for 8 images instead of 145; 512 channels of 7x7 each 7.0 instead of 8.8,
    256 of 14x14 7.8 instead of 9.3 (two cores of an EPYC, Zen 4).

    Before: %sums[n, h, w, g, f] = sum over i, j, c of
                %padded[n, h + i, w + j, c] * %panels[g, i, j, c, f]             3x3, padding of 1
            %y = relu(%sums)
    After:  for each block of images n, row h, panel g: for w in 0..W:
                %tile = 0
                for i in max(0, 1 - h)..min(3, H + 1 - h), j in max(0, 1 - w)..min(3, W + 1 - w):
                    %tile[n, f] += sum over c of %x[n, h + i - 1, w + j - 1, c] * %panels[...]
                %y[n, h, w, g, f] = relu(%tile)

    Args:
        module: one in flow, its dispatches formed (see `lowering.stages.linalg.mark_convolutions`).
    """
    found = [_Program.of(executable) for executable in inside(module, EXECUTABLE)]
    for program in filter(None, found):
        if not program.can_be_tiled() and program.is_of_any_number:
            continue
        whole = program if program.can_be_tiled() else program.separated(module)
        for part in whole.by_images(module):
            part.write()


@dataclass(frozen=True)
class _Program:
    """A device program with a marked convolution.

    Attributes:
        executable: the program.
        function: its function.
        op: the convolution.
        mark: what is known of it.
        images: what it reads, `[N, H, W, C]`, as an argument of the function.
        panels: the weight, as another one.
        is_padded: whether the images are.
    """

    executable: Any
    function: Any
    op: Any
    mark: Mark
    images: Any
    panels: Any
    is_padded: bool = True

    @classmethod
    def of(cls, executable: Any) -> _Program | None:
        """Find the convolution in a program; None if there is none."""
        for function in functions_of(executable):
            for op in ops_of(function):
                if (mark := Mark.of(op)) is not None and all(map(is_loaded, inputs_of(op))):
                    images, panels = (value.owner.operands[0] for value in inputs_of(op))
                    return cls(executable, function, op, mark, images, panels)
        return None

    @property
    def _made(self) -> tuple[Any, int, int, Sequence[int], int]:
        """How many images, rows, columns, panels (one is no dimension) and features there are."""
        shape: Any = sizes_of(self.op.results[0].type)
        count = [] if self._is_one else [shape[0]]
        height, width, *panels, columns = shape[len(count) :]
        return count[0] if count else 1, height, width, panels, columns

    @property
    def is_of_any_number(self) -> bool:
        """Whether it is not known how many images there are."""
        return self._made[0] is None

    @property
    def _is_one(self) -> bool:
        """Whether there is one image, which is no dimension either."""
        return len(inputs_of(self.op)[0].type.shape) == 3

    @property
    def _ops(self) -> list[Any]:
        """All ops of the function but its return."""
        return ops_of(self.function)[:-1]

    @property
    def _followers(self) -> list[Any]:
        """What computes after the convolution, or stores."""
        ops = self._ops
        followers = ops[ops.index(self.op) + 1 :]
        return [op for op in followers if op.name not in _SOURCES]

    def can_be_tiled(self) -> bool:
        """Say whether all that follows the convolution can be computed tile by tile."""
        return can_be_tiled(self._followers, self.op.results[0])

    def separated(self, module: Any) -> _Program:
        """Give the convolution a program of its own, whose result this one then reads."""
        from iree.compiler import ir

        sums, own = self.op.results[0], [self.images, self.panels]
        name = f"{symbol_of(self.executable)}_convolution"
        made, read = (argument_type(access, sums.type) for access in ("writeonly", "readonly"))
        taken = f"%xs: {own[0].type}, %ws: {own[1].type}, %sums: {made}"
        with ir.InsertionPoint(self.executable):
            alone = put_program(name, name, taken)
        ((block,),) = (function.regions[0].blocks for function in functions_of(alone))
        loaded = [value.owner for value in inputs_of(self.op)]
        begun = [op for op in self._ops if op.name in _SOURCES and op.name != LOAD]
        with ir.InsertionPoint(block.operations[0]), self.op.location:
            arguments = dict(zip(own, block.arguments, strict=False))
            values = clones([*loaded, *begun, self.op], arguments)
            Tile.whole(sums.type.shape).store(values[sums], block.arguments[2])
        program = self.of(alone)
        assert program is not None
        for dispatch in dispatches_of(module, self.executable):
            places = [place_of(dispatch, argument) for argument in own]
            with ir.InsertionPoint(dispatch), dispatch.location:
                operands = [(dispatch.operands[place], ()) for place in places]
                new = put_dispatch(alone, operands, [(sums.type, ())])
            dispatch.operands[places[1]] = new.result
        self.panels.set_type(read)
        set_type(self.function)
        with ir.InsertionPoint(self.op):
            whole = Tile.whole(sums.type.shape).load(self.panels, dtype_of(sums))
        sums.replace_all_uses_with(whole)
        for op in (self.op, *loaded):
            op.erase()
        return program

    def by_images(self, module: Any) -> list[_Program]:
        """Read images as they are where they are only copied to be padded, and no place skips that.

        Returns:
            The program, or two: one for where they are, and one for where they are not.
        """
        if self.mark.places > 1:
            return [self]
        dispatches = dispatches_of(module, self.executable)
        places = [place_of(dispatch, self.images) for dispatch in dispatches]
        sources = [
            self._source(module, dispatch.operands[place])
            for dispatch, place in zip(dispatches, places, strict=True)
        ]
        if not any(sources):
            return [self]
        programs = [replace(self, is_padded=False)]
        if not all(sources):
            programs.append(self._copied())
        for dispatch, place, source in zip(dispatches, places, sources, strict=True):
            if source is None:
                dispatch.attributes["entry_points"] = entries_of(programs[-1].executable)
                continue
            copy = dispatch.operands[place].owner
            dispatch.operands[place] = source
            if not any(True for _ in copy.results[0].uses):
                copy.erase()
            self.images.set_type(argument_type("readonly", source.type))
        set_type(self.function)
        return programs

    def _copied(self) -> _Program:
        """Write the program again, under other names."""
        from iree.compiler import ir

        with ir.InsertionPoint(self.executable):
            executable = self.executable.operation.clone()
        (export,), (function,) = inside(executable, EXPORT), functions_of(executable)
        for op in (executable, export, function):
            op.attributes["sym_name"] = ir.StringAttr.get(f"{symbol_of(op)}_of_padded")
        export.attributes["function_ref"] = ir.FlatSymbolRefAttr.get(symbol_of(function))
        program = self.of(executable)
        assert program is not None
        return program

    def _source(self, module: Any, padded: Any) -> Any:
        """Return the images that are copied to be padded; None if they are made otherwise."""
        if maker_of(padded) != DISPATCH or not any(map(any, self.mark.padding)):
            return None
        name = entry_of(padded.owner)
        (executable,) = (op for op in inside(module, EXECUTABLE) if symbol_of(op) == name)
        ((block,),) = (function.regions[0].blocks for function in functions_of(executable))
        load, *others = [op.operation for op in block.operations]
        if [load.name, *(op.name for op in others)] != [LOAD, STORE, "func.return"]:
            return None
        store, _ = others
        begin, end = ([0, *amounts, 0] for amounts in zip(*self.mark.padding, strict=True))
        if not (is_whole(load) and is_at(store, begin)):
            return None
        source = padded.owner.operands[place_of(padded.owner, load.operands[0])]
        sizes = zip(source.type.shape, begin, end, strict=True)
        # What was padded before is padded at once by IREE, and by more than the mark knows of.
        return source if list(map(sum, sizes)) == list(padded.type.shape) else None

    def write(self) -> None:
        """Write the loops, and what follows the convolution as of their tiles."""
        from iree.compiler import ir

        old, followers, sums = self._ops, self._followers, self.op.results[0]
        count, height, _, panels, columns = self._made
        *_, end = ops_of(self.function)
        with ir.InsertionPoint(end), self.op.location:
            given = [self.images, self.panels, *sizes_in_program(self.images)]
            image, row, panel = put(self._loops(), given)
        *_, loop = self._ops
        (body,) = loop.regions[0].blocks
        *_, nest, end = body.operations
        where = [image, row, body.arguments[0], *([panel] if panels else []), None]
        sizes = [self.mark.images, 1, self.mark.places, *(1 for _ in panels), columns]
        tile = Tile(sizes[self._is_one :], where[self._is_one :])
        with ir.InsertionPoint(end):
            write_tiled(followers, sums, nest.operation.results[0], tile)
        (items,) = panels or [1]
        if self.is_of_any_number:
            compute_workgroups(self.executable, _WORKGROUPS.format(rows=height, panels=items))
        else:
            tell_flops(self.function, self._flops(count))
            set_workgroups(self.executable, [height, items, count // self.mark.images])
        for op in reversed(old):
            if op.name not in _KEPT:
                op.erase()

    def _flops(self, count: int) -> int:
        """Count the multiplications and additions, of so many images."""
        _, height, width, panels, columns = self._made
        *kernel, channels, _ = inputs_of(self.op)[1].type.shape[-4:]
        *sizes, _ = inputs_of(self.op)[0].type.shape[-3:]
        mark, steps = self.mark, 2 * count * channels * math.prod(panels) * columns
        for places, window, size, step, apart, (before, after) in zip(
            (height, width), kernel, sizes, mark.stride, mark.dilation, mark.padding, strict=True
        ):
            seen = range(before, size - after)
            steps *= sum(h * step + i * apart in seen for h in range(places) for i in range(window))
        return int(steps)

    def _loops(self) -> str:
        _, _, width, panels, columns = self._made
        *kernel, channels, _ = inputs_of(self.op)[1].type.shape[-4:]
        *sizes, all_channels = inputs_of(self.op)[0].type.shape[-3:]
        begins, ends, reads = list[str](), list[str](), list[str]()
        for size, step, apart, (before, after) in zip(
            sizes, self.mark.stride, self.mark.dilation, self.mark.padding, strict=True
        ):
            begins.append(f"({before} - d0 * {step}) ceildiv {apart}")
            ends.append(f"({size - after} - d0 * {step}) ceildiv {apart}")
            skipped = 0 if self.is_padded else before
            reads.append(f"d0 * {step} + d1 * {apart} - {skipped}")
        images, places = self.mark.images, self.mark.places
        if places > 1:  # where the window of one is outside of the image, others' are not
            begins[1], ends[1] = "0", str(kernel[1])
        return _LOOPS.format(
            sizes=", %n: index" if self.is_of_any_number else "",
            unknown="{%n}" if self.is_of_any_number else "",
            xs=self.images.type,
            ws=self.panels.type,
            count=images,
            image="" if self._is_one else "%image, ",
            images="" if self._is_one else f"{images}, ",
            each="" if self._is_one else "1, ",
            places=places,
            apart=self.mark.stride[1] if places > 1 else 1,
            of_group=math.prod(panels) * channels // all_channels,
            columns=columns,
            channels=channels,
            tiles=tiles_of_product(images * places, columns),
            width=width,
            panel="%panel, " if panels else "",
            one="1, " if panels else "",
            tile=floats(images * places, columns),
            pixels=floats(images * places, channels),
            factors=floats(channels, columns),
            above=begins[0],
            left=begins[1],
            below=ends[0],
            right=ends[1],
            high=kernel[0],
            wide=kernel[1],
            y=reads[0],
            x=reads[1],
        )

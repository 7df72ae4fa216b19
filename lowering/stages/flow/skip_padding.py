"""Convolve several images, or places, at a time, and only where a window is inside of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lowering.stages.flow.marked_convolution import MarkedConvolution
from lowering.stages.flow.tiled_followers import Tile, can_be_tiled, write_tiled
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
from lowering.stages.ir.templates import clones, put
from lowering.stages.ir.types import dtype_of

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


def skip_padding(module: Any) -> None:
    """Write marked convolutions as loops over the places of a window that are inside of an image.

    Or a few places of one image, for convolutions in groups, of one channel or of few features;
    these skip rows of the padding only. Where a row is no whole number of blocks, the last one
    begins within the one before, and computes the same again.

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
        if not program.can_be_tiled() and program.convolution.is_of_any_number:
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
        convolution: it.
        images: what it reads, `[N, H, W, C]`, as an argument of the function.
        panels: the weight, as another one.
        is_padded: whether the images are.
    """

    executable: Any
    function: Any
    convolution: MarkedConvolution
    images: Any
    panels: Any
    is_padded: bool = True

    @classmethod
    def of(cls, executable: Any) -> _Program | None:
        """Find the convolution in a program; None if there is none."""
        for function in functions_of(executable):
            for op in ops_of(function):
                if (convolution := MarkedConvolution.of(op)) is not None:
                    images, panels = (value.owner.operands[0] for value in inputs_of(op))
                    return cls(executable, function, convolution, images, panels)
        return None

    @property
    def _ops(self) -> list[Any]:
        """All ops of the function but its return."""
        return ops_of(self.function)[:-1]

    @property
    def _followers(self) -> list[Any]:
        """What computes after the convolution, or stores."""
        ops = self._ops
        followers = ops[ops.index(self.convolution.op) + 1 :]
        return [op for op in followers if op.name not in _SOURCES]

    def can_be_tiled(self) -> bool:
        """Say whether all that follows the convolution can be computed tile by tile."""
        return can_be_tiled(self._followers, self.convolution.op.results[0])

    def separated(self, module: Any) -> _Program:
        """Give the convolution a program of its own, whose result this one then reads."""
        from iree.compiler import ir

        sums, own = self.convolution.op.results[0], [self.images, self.panels]
        name = f"{symbol_of(self.executable)}_convolution"
        made, read = (argument_type(access, sums.type) for access in ("writeonly", "readonly"))
        taken = f"%xs: {own[0].type}, %ws: {own[1].type}, %sums: {made}"
        with ir.InsertionPoint(self.executable):
            alone = put_program(name, name, taken)
        ((block,),) = (function.regions[0].blocks for function in functions_of(alone))
        loaded = [value.owner for value in inputs_of(self.convolution.op)]
        begun = [op for op in self._ops if op.name in _SOURCES and op.name != LOAD]
        with ir.InsertionPoint(block.operations[0]), self.convolution.op.location:
            arguments = dict(zip(own, block.arguments, strict=False))
            values = clones([*loaded, *begun, self.convolution.op], arguments)
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
        with ir.InsertionPoint(self.convolution.op):
            whole = Tile.whole(sums.type.shape).load(self.panels, dtype_of(sums))
        sums.replace_all_uses_with(whole)
        for op in (self.convolution.op, *loaded):
            op.erase()
        return program

    def by_images(self, module: Any) -> list[_Program]:
        """Read images as they are where they are only copied to be padded, and no place skips that.

        Returns:
            The program, or two: one for where they are, and one for where they are not.
        """
        if self.convolution.mark.places > 1:
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
        if maker_of(padded) != DISPATCH or not any(map(any, self.convolution.mark.padding)):
            return None
        name = entry_of(padded.owner)
        (executable,) = (op for op in inside(module, EXECUTABLE) if symbol_of(op) == name)
        ((block,),) = (function.regions[0].blocks for function in functions_of(executable))
        load, *others = [op.operation for op in block.operations]
        if [load.name, *(op.name for op in others)] != [LOAD, STORE, "func.return"]:
            return None
        store, _ = others
        begin, end = (
            [0, *amounts, 0] for amounts in zip(*self.convolution.mark.padding, strict=True)
        )
        if not (is_whole(load) and is_at(store, begin)):
            return None
        source = padded.owner.operands[place_of(padded.owner, load.operands[0])]
        sizes = zip(source.type.shape, begin, end, strict=True)
        # What was padded before is padded at once by IREE, and by more than the mark knows of.
        return source if list(map(sum, sizes)) == list(padded.type.shape) else None

    def write(self) -> None:
        """Write the loops, and what follows the convolution as of their tiles."""
        from iree.compiler import ir

        convolution, old, followers = self.convolution, self._ops, self._followers
        sums, mark = convolution.op.results[0], convolution.mark
        count, height, _, panels, columns = convolution.made
        *_, end = ops_of(self.function)
        with ir.InsertionPoint(end), convolution.op.location:
            given = [self.images, self.panels, *sizes_in_program(self.images)]
            text = convolution.loops(self.images, self.panels, is_padded=self.is_padded)
            image, row, panel = put(text, given)
        *_, loop = self._ops
        (body,) = loop.regions[0].blocks
        column, *_, nest, end = body.operations
        where = [image, row, column.operation.results[0], *([panel] if panels else []), None]
        sizes = [mark.images, 1, mark.places, *(1 for _ in panels), columns]
        tile = Tile(sizes[convolution.is_one :], where[convolution.is_one :])
        with ir.InsertionPoint(end):
            write_tiled(followers, sums, nest.operation.results[0], tile)
        (items,) = panels or [1]
        if convolution.is_of_any_number:
            compute_workgroups(self.executable, _WORKGROUPS.format(rows=height, panels=items))
        else:
            tell_flops(self.function, convolution.flops(count))
            set_workgroups(self.executable, [height, items, count // mark.images])
        for op in reversed(old):
            if op.name not in _KEPT:
                op.erase()

"""Keep IREE from packing in a device program what it cannot pack there, or not rightly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lowering.stages.ir.device_programs import (
    DISPATCH,
    EXECUTABLE,
    STORE,
    argument_of,
    functions_of,
    made_by,
    results_of,
    set_type,
)
from lowering.stages.ir.structured import is_elementwise, loops_of, maps_of
from lowering.stages.ir.symbols import inside, maker_of, symbol_of, walk
from lowering.stages.ir.types import sizes_of

_PACKS = "iree_encoding.set_encoding"
_SPLITS = "tensor.expand_shape"
_MERGES = "tensor.collapse_shape"
_TILES = (2, 4, 8, 16, 32, 64)  # rows or columns that data tiling may pack together


def separate_packing(module: Any) -> None:
    """Give what packs rows that were split a device program of its own, where they are padded.

    IREE moves the packing before the split (`CPUPropagateDataLayout`) whenever the number of tiles
    comes out the same, and so pads all rows at their common end instead of each batch at its own:
    13 + 13 rows make two tiles of 16 as 26 do. `linear(x) @ y` of two texts of 13 tokens was wrong,
    and grouped attention of 4 heads on 2 of keys. In a program that does nothing but pack, there is
    no split.

    So it is for what is packed, of unknown sizes, where it is also summed up (`x - x.mean(0)` in a
    covariance): IREE refuses its own code ("'affine.delinearize_index' op no basis element may be
    statically non-positive").

    So it is for what a convolution makes, whose blocks of places are not the tiles of rows: IREE
    makes blocks of one feature for the tiles' sake, and refuses ours where these do not divide a
    tile ("large vector sizes": a UNet with batch norm, 128 rows of 64 places, 3 columns behind).

    Before: flow.executable @a: %1 = tensor.expand_shape %0 [[0, 1], [2]] output_shape [2, 13, 64]
                                store(set_encoding %1)
            %2 = flow.dispatch @a::@a(...) : ... -> tensor<2x13x64xf32, #encoding>
    After:  flow.executable @a: store(%1)
            %2 = flow.dispatch @a::@a(...) : ... -> tensor<2x13x64xf32>
            %3 = flow.tensor.encode %2 : tensor<2x13x64xf32> -> tensor<2x13x64xf32, #encoding>

    Args:
        module: one in flow, its dispatches formed.

    Raises:
        RuntimeError: such a packing is used in a way that is not known here.
    """
    unpacked = dict[str, dict[int, Any]]()  # entry point -> place among its results -> packed type
    for executable in inside(module, EXECUTABLE):
        for function in functions_of(executable):
            name = f"@{symbol_of(executable)}::@{symbol_of(function)}"
            unpacked[name] = dict(map(_store_unpacked, _unfit_packs(function)))
            if unpacked[name]:
                set_type(function)
    for op in [op for op in walk(module) if op.name == DISPATCH]:
        (name,) = {str(entry) for entry in op.attributes["entry_points"]}
        for place, kind in unpacked.get(name, {}).items():
            _pack_behind(op, place, kind)


def _unfit_packs(function: Any) -> list[Any]:
    ops = list(walk(function))
    has_panels = any("compilation_info" in op.attributes for op in ops)
    sums = [op for op in ops if op.name == "linalg.generic" and not is_elementwise(op)]
    has_blocks = has_panels or any(map(_reads_windows, sums))
    packs = [op for op in ops if op.name == _PACKS]
    makers = [maker_of(op.operands[0]) for op in packs]
    return [
        op
        for op, maker in zip(packs, makers, strict=True)
        if (maker == _SPLITS and _is_misread(op))
        or (maker == _MERGES and has_blocks)
        or (sums and None in sizes_of(op.operands[0].type))
    ]


def _reads_windows(op: Any) -> bool:
    return any(None in loops_of(read) for read in maps_of(op))


def _is_misread(pack: Any) -> bool:
    """Say whether the tiles of rows may be as many with the rows as they are before the split."""
    split, sizes = pack.operands[0].owner, sizes_of(pack.operands[0].type)
    groups = [[sizes[d.value] for d in group] for group in split.attributes["reassociation"]]
    return any(map(_is_padded_otherwise, groups))


def _is_padded_otherwise(sizes: Sequence[int | None]) -> bool:
    """Say whether the last size may be padded while what all make together has as many tiles."""
    *others, last = [size for size in sizes if size != 1] or [1]
    if not others or (last is not None and last % _TILES[-1] == 0):
        return False
    if last is None or None in others:
        return True
    count = math.prod(size for size in others if size is not None)
    return any(
        last % tile and count * math.ceil(last / tile) == math.ceil(count * last / tile)
        for tile in _TILES
    )


def _store_unpacked(pack: Any) -> tuple[int, Any]:
    """Have the function store what is not packed; return which of its results, and what it was."""
    from iree.compiler import ir

    uses = list(pack.results[0].uses)
    if [use.owner.name for use in uses] != [STORE]:
        raise RuntimeError("what is packed after a reshape is used for more than to be stored")
    store = uses[0].owner
    packed, plain = pack.results[0].type, pack.operands[0].type
    target = store.operands[1]
    argument = argument_of(target)
    made = [a for a in argument.owner.arguments if "<writeonly:" in str(a.type)]
    kind = ir.Type.parse(str(target.type).replace(str(packed), str(plain)))
    for value in {target, argument}:
        value.set_type(kind)
    store.operands[0] = pack.operands[0]
    pack.erase()
    return made.index(argument), packed


def _pack_behind(dispatch: Any, place: int, packed: Any) -> None:
    """Pack one of the results that a dispatch makes, by its place among them."""
    from iree.compiler import ir

    result = made_by(dispatch)[place]
    kind = ir.RankedTensorType(packed)
    result.set_type(ir.RankedTensorType.get(kind.shape, kind.element_type))
    sizes = dict(results_of(dispatch))[result]
    segments = ir.DenseI32ArrayAttr.get([1, len(sizes), len(sizes)])
    with ir.InsertionPoint.after(dispatch), dispatch.location:
        pack = ir.Operation.create(
            "flow.tensor.encode",
            results=[packed],
            operands=[result, *sizes, *sizes],
            attributes={"operandSegmentSizes": segments},
        )
    result.replace_all_uses_except(pack.result, [pack])

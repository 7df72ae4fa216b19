"""Write convolutions of several images such that each weight that is loaded serves all of these."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from lowering.cpu import best_for
from lowering.stages.ir.convolutions import BLOCKS, BLOCKS_OF_A_ROW, DENSE, IN_GROUPS, Mark
from lowering.stages.ir.matrix_unit import has_tiles
from lowering.stages.ir.structured import is_transpose, is_zeros
from lowering.stages.ir.symbols import constant_of, inside, maker_of, ops_of
from lowering.stages.ir.tensors import TO_FIRST, TO_LAST, reordered
from lowering.stages.ir.types import dtype_of, sizes_of
from lowering.stages.linalg.blocked_convolution import BlockedConvolution


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

    So they do of one channel, whose loop IREE drops, and with it what it does for convolutions (5x5
    for 20 features, 64 images of 28x28: 2.3 ms instead of 19; eager 1.3); and of features that are
    no whole panels, the last of which then has columns over (64 channels to 3, 3x3 of 64x64: 0.8
    instead of 2.1; eager 0.8).

    Before: %p = tensor.pad %x; %y = linalg.conv_2d_nchw_fchw ins(%p, %w)
    After:  %l = transpose %x [0, 2, 3, 1]; %p = tensor.pad %l
            %panels[g, i, j, c, f] = %w[32 * g + f, c, i, j]         (or 16; one panel is no g,
                                                                      one channel no c)
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
        if is_transpose(user, TO_LAST):
            user.results[0].replace_all_uses_with(last)
            user.erase()
    if any(True for _ in result.uses):
        result.replace_all_uses_with(reordered(last, TO_FIRST))
    op.erase()


def _of_images(op: Any, features: Collection[str]) -> BlockedConvolution | None:
    """Read a convolution off; None if it is not written anew."""
    values = op.operation, *op.operands
    if not _is_known(values):
        return None
    sizes: Any = [sizes_of(value.type) for value in values[1:3]]
    (count, channels, *_), (made, *_) = sizes
    blocks = () if has_tiles(features) or count is None else best_for(features, BLOCKS)
    for at_a_time, columns in blocks:
        images = max((n for n in at_a_time if count % n == 0), default=0)
        if images and made % columns == 0 and channels > 1:
            return _convolution_of(op, values, 1, (images, 1), columns)
    widest = max((columns for _, columns in best_for(features, BLOCKS_OF_A_ROW)), default=1)
    is_left = made % widest == 0 and channels > 1
    return None if is_left else _of_rows(op, values, 1, features)


def _of_rows(
    op: Any, values: Sequence[Any], groups: int, features: Collection[str]
) -> BlockedConvolution | None:
    """Read a convolution off, of blocks of a row; None if it is not written anew.

    The panels of a group are full; without groups, the last may have columns over. The block is the
    one of which the fewest have all features, and the fewest columns.

    Args:
        op, values, groups: as for `_convolution_of`.
        features: of the CPU.
    """
    sizes: Any = sizes_of(values[0].results[0].type)
    _, made, _, width = sizes
    of_group = made // groups
    blocks = [
        (-(-of_group // columns), most, columns)
        for most, columns in best_for(features, BLOCKS_OF_A_ROW)
        if groups == 1 or of_group % columns == 0
    ]
    if not blocks:
        return None
    _, most, columns = min(blocks, key=lambda block: (block[0] / block[1], block[0] * block[2]))
    places = -(-width // -(-width // most))
    return _convolution_of(op, values, groups, (1, places), columns)


def _in_groups(op: Any, features: Collection[str]) -> BlockedConvolution | None:
    """Read a convolution in groups off; None if it is not written anew."""
    groups: Any = sizes_of(op.operands[1].type)[0]
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
    values = *readers, image, weight, start
    return _of_rows(op, values, groups, features) if _is_known(values) else None


def _is_known(values: Sequence[Any]) -> bool:
    """Say whether a convolution is of float32, of some numbers, and all sizes but N are known.

    Args:
        values: as for `_convolution_of`.
    """
    tensors = [*values[0].results, *values[1:]]
    sizes = [size for value in tensors for size in sizes_of(value.type)[1:]]
    features = sizes_of(values[2].type)[0]
    return all([*sizes, features]) and {*map(dtype_of, tensors)} == {"f32"}


def _merged(value: Any) -> Any:
    """Return a tensor without a dimension of groups; None: there is no such tensor."""
    return value.owner.operands[0] if maker_of(value) == "tensor.expand_shape" else None


def _convolution_of(
    op: Any,
    values: Sequence[Any],
    groups: int,
    block: tuple[int, int],
    columns: int,
) -> BlockedConvolution | None:
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
    kernel = weight.type.shape[2:]
    # IREE takes dimensions of one element out of device programs.
    if min(*kernel, height, width) < 2:
        return None
    if math.prod(kernel) > height * width:  # the gradient of a weight, whose blocks are others
        return None
    padding = _padding_of(image)
    return BlockedConvolution(
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

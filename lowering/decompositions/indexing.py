"""Writes through tensors of indices, in the form that torch-mlir lowers rightly and IREE in place.

Where the first dimensions are written as a whole, torch-mlir writes element by element.

With indices of two or more dimensions whose sizes are dynamic, torch-mlir drops all but the first
dimension of the values: memory that nobody wrote would be scattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_or

from lowering.decompositions.recursion import Ours
from lowering.sizes import is_static

aten = torch.ops.aten
_OURS = Ours()
_PYTORCHS = get_decompositions([aten.index_add, aten.index_copy, aten.index_fill])


def index_put(
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> Any:
    """Decompose `aten.index_put`: indices count from the start, and one is for a whole row.

    What a mask says is to be the same everywhere is chosen, not put: there it does not matter how
    many places there are.

    torch-mlir writes where a negative index says, which is before the tensor. With whole dimensions
    first it writes element by element, so these get indices of their own; dynamic ones, too.

    Before: %1 = index_put(%x, [None, %i], %values)                with %x of [B, L, D], %i of [S]
    After:  %w = where(%i < 0, %i + L, %i)
            %b = view(expand(view(arange(B), [B, 1]), [B, S]), [B*S]); %j = view(expand(%w), [B*S])
            %1 = index_put(%x, [%b, %j], view(%values, [B*S, D]))
    """
    if _OURS.is_done:
        return NotImplemented
    indices = [  # of bytes are masks, too
        i.to(torch.bool) if i is not None and i.dtype is torch.uint8 else i for i in indices
    ]
    if any(i is not None and i.dtype is torch.bool for i in indices):
        chosen = _by_mask(x, indices, values, accumulate)
        if chosen is not NotImplemented:
            return chosen
    else:
        pairs = zip(indices, x.shape, strict=False)
        indices = [None if i is None else _counted(i, size) for i, size in pairs]
        if accumulate and _is_grid(indices):
            return _added_along_each(x, indices, values)
        if _wants_rows(x, indices, values):
            indices, values = _by_rows(x, indices, values)
    with _OURS:
        return aten.index_put.default(x, indices, values, accumulate)


def _by_mask(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool
) -> Any:
    """Choose between a tensor and values that do not depend on how many places a mask has.

    Before: %1 = index_put(%x, [None, %m], %values)            with %x of [B, L, D], %m of [L], and
            %values of [D]
    After:  %1 = where(view(%m, [L, 1]), %values, %x)
    """
    (mask, *others) = (i for i in indices if i is not None)
    first = next(d for d, i in enumerate(indices) if i is not None)
    if others or mask.dim() == 0:
        return NotImplemented
    rest = x.dim() - first - mask.dim()
    if values.dim() > rest:
        places = values.dim() - rest - 1  # the dimension along which there is one for each place
        if not isinstance(count := values.shape[places], int) or count != 1:
            return NotImplemented
        sizes = [*values.shape[:places], *[1] * mask.dim(), *values.shape[places + 1 :]]
        values = values.reshape(sizes)
    mask = mask.reshape([*mask.shape, *[1] * rest])
    chosen = torch.where(mask, x + values if accumulate else values, x)
    is_like = not is_static(x) or chosen.stride() == x.stride()
    return chosen if is_like else aten.copy.default(torch.empty_like(x), chosen)


def index_put_impl(
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> torch.Tensor:
    """Decompose `aten._index_put_impl`, which is what eager makes of `x[i] = values`."""
    result: torch.Tensor = torch.ops.aten.index_put(x, indices, values, accumulate)
    return result


def index_copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
    """Decompose `aten.index_copy`, which counts no index from the end, as PyTorch does."""
    return _PYTORCHS[aten.index_copy.default](x, dim, _from_the_start(x, dim, index), source)


def index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> Any:
    """Decompose `aten.index_add`, which counts no index from the end, as PyTorch does."""
    index = _from_the_start(x, dim, index)
    return _PYTORCHS[aten.index_add.default](x, dim, index, source, alpha=alpha)


def index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> Any:
    """Decompose `aten.index_fill`, which counts from the end, too: PyTorch makes a copy of it."""
    counted = _counted(index, _size(x, dim))
    is_tensor = isinstance(value, torch.Tensor)
    op = aten.index_fill.int_Tensor if is_tensor else aten.index_fill.int_Scalar
    return _PYTORCHS[op](x, dim, counted, value)


def scatter_add(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
    """Decompose `aten.scatter_add` of whole rows: torch-mlir adds element by element.

    Before: scatter_add(%x, 0, expand(%i, [N, D]), %source)         with %i of [N, 1], %x of [L, D]
    After:  index_put(%x, [view(%i, [N])], %source, accumulate=True)
    """
    dim = dim % max(1, x.dim())
    is_of_rows = x.dtype is not torch.bool and _is_repeated(index, range(dim + 1, index.dim()))
    if not is_of_rows or _first(x, dim, index) is not x:
        return NotImplemented
    source = _first(source, dim, index)
    if not statically_known_true(source.shape[dim] == index.shape[dim]):
        source = aten.slice.Tensor(source, dim, 0, index.shape[dim])
    for _ in range(dim + 1, index.dim()):
        index = aten.select.int(index, -1, 0)
    places: Sequence[torch.Tensor | None] = [None] * dim
    if _is_repeated(index, range(dim)):
        for _ in range(dim):
            index = aten.select.int(index, 0, 0)
    else:
        places = _numbers(index, dim, dim + 1)
    return aten.index_put(x, [*places, _from_the_start(x, dim, index)], source, True)


def _is_repeated(index: torch.Tensor, dims: Sequence[int]) -> bool:
    """Say whether indices are the same all along dimensions, each of which has some."""
    steps, sizes = index.stride(), index.shape
    return len(dims) > 0 and all(
        statically_known_true(sizes[d] > 0)
        and statically_known_true(sym_or(steps[d] == 0, sizes[d] == 1))
        for d in dims
    )


def _first(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Return as much as an index has of the other dimensions."""
    for d, (size, count) in enumerate(zip(x.shape, index.shape, strict=True)):
        if d != dim % x.dim() and not statically_known_true(size == count):
            x = aten.slice.Tensor(x, d, 0, count)
    return x


def _from_the_start(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Let negative indices be out of range."""
    return torch.where(index < 0, _size(x, dim), index)


def _counted(index: torch.Tensor, size: int) -> torch.Tensor:
    """Count all from the start."""
    return torch.where(index < 0, index + size, index)


def _size(x: torch.Tensor, dim: int) -> int:
    """Return how many places there are along a dimension, which a number has none of."""
    return x.shape[dim] if x.dim() else 1


def _wants_rows(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor
) -> bool:
    if not _are_side_by_side(indices):
        return False  # such put their dimensions first
    given = [i for i in indices if i is not None]
    are_static = is_static(x, values, *given)
    if _first_place(indices):  # whole dimensions first
        return not are_static or len(indices) < x.dim()
    return not are_static and not _is_by_rows(x, given, values)


def _are_side_by_side(indices: Sequence[torch.Tensor | None]) -> bool:
    places = [d for d, i in enumerate(indices) if i is not None]
    return places == list(range(places[0], places[-1] + 1))


def _first_place(indices: Sequence[torch.Tensor | None]) -> int:
    """Count the whole dimensions before the first index."""
    return next(d for d, i in enumerate(indices) if i is not None)


def _is_grid(indices: Sequence[torch.Tensor | None]) -> bool:
    """Say whether each of several indices is along a dimension of its own of what is put."""
    given = [i for i in indices if i is not None]
    if len(given) < 2 or not _are_side_by_side(indices):
        return False
    axes = [
        [
            axis - i.dim()
            for axis, size in enumerate(i.shape)
            if not statically_known_true(size == 1)
        ]
        for i in given
    ]
    return axes == [[axis] for axis in range(-len(given), 0)]


def _added_along_each(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor
) -> torch.Tensor:
    """Add along one of the dimensions that a grid of indices is of, then along the next.

    So rows are added, and not numbers: what flows back through the resizing of images.

    Before: %1 = index_put(%x, [None, %i, %j], %values, True)      with %i of [M, 1], %j of [N]
    After:  %a = index_put(zeros([B, H, N]), [None, view(%i, [M])], %values, True)
            %1 = movedim(index_put(movedim(%x, 2, 0), [%j], movedim(%a, 2, 0), True), 0, 2)
    """
    first = _first_place(indices)
    given = [i.reshape(-1) for i in indices[first:] if i is not None]
    counts, rest = [i.shape[0] for i in given], x.shape[first + len(given) :]
    values = values.expand([*x.shape[:first], *counts, *rest])
    for k, index in enumerate(given[:-1]):
        sizes = [*x.shape[: first + k + 1], *counts[k + 1 :], *rest]
        places = [*[None] * (first + k), index]
        values = aten.index_put(values.new_zeros(sizes), places, values, True)
    last = first + len(given) - 1
    added = aten.index_put(x.movedim(last, 0), given[-1:], values.movedim(last, 0), True)
    result: torch.Tensor = added.movedim(0, last)
    return result


def _is_by_rows(x: torch.Tensor, indices: Sequence[torch.Tensor], values: torch.Tensor) -> bool:
    wanted = (indices[0].numel(), *x.shape[len(indices) :])
    return (
        all(i.dim() == 1 for i in indices)
        and all(tuple(t.shape[:1]) == wanted[:1] for t in indices)
        and tuple(values.shape) == wanted
    )


def _by_rows(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Give each row that is written an index of its own; returns the indices, and the rows."""
    count = _first_place(indices)
    given = _broadcast([i for i in indices if i is not None])
    sizes, rest = [*x.shape[:count], *given[0].shape], x.shape[count + len(given) :]
    rows = _numbers(x, count, len(sizes))
    flat = [i.expand(sizes).reshape(-1) for i in (*rows, *given)]
    return flat, values.expand([*sizes, *rest]).reshape(-1, *rest)


def _numbers(x: torch.Tensor, count: int, rank: int) -> list[torch.Tensor]:
    """Number the places along each of the first dimensions, as indices of a rank."""
    return [
        torch.arange(n, device=x.device).view([-1] + [1] * (rank - d - 1))
        for d, n in enumerate(x.shape[:count])
    ]


def _broadcast(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    return [t.expand(shape) for t in tensors]


def embedding(weight: torch.Tensor, indices: torch.Tensor, *_: Any) -> Any:
    """Decompose `aten.embedding` of integers, such as quantized weights: rows are selected."""
    if weight.is_floating_point() or weight.is_complex():
        return NotImplemented
    rows = torch.index_select(weight, 0, indices.reshape(-1))
    return rows.view(*indices.shape, weight.shape[1])


DECOMPOSITIONS = {
    aten._index_put_impl.default: index_put_impl,
    aten.embedding.default: embedding,
    aten.index_add.default: index_add,
    aten.index_copy.default: index_copy,
    aten.index_fill.int_Scalar: index_fill,
    aten.index_fill.int_Tensor: index_fill,
    aten.index_put.default: index_put,
    aten.scatter_add.default: scatter_add,
}

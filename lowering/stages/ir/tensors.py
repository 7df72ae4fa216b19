"""Write tensors again, of any sizes: in another order, padded, or computed number by number."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from lowering.stages.ir.templates import put
from lowering.stages.ir.types import sizes_of, tensor

# Orders of the dimensions of images.
TO_LAST, TO_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
_REORDERED = """
func.func @reordered(%x: {x}{sizes}) -> {y} {{
  %empty = tensor.empty({unknown}) : {y}
  %y = linalg.transpose ins(%x : {x}) outs(%empty : {y}) permutation = {order}
  return %y : {y}
}}
"""
_PADDED = """
func.func @padded(%x: {x}, %fill: {dtype}) -> {y} {{
  %y = tensor.pad %x low{low} high{high} {{
  ^bb0({places}):
    tensor.yield %fill : {dtype}
  }} : {x} to {y}
  return %y : {y}
}}
"""
_RESHAPED = """
func.func @reshaped(%x: {x}) -> {y} {{
  %y = tensor.{op} %x {dims} {sizes} : {x} into {y}
  return %y : {y}
}}
"""
_COMPUTED = """
func.func @computed({arguments}{sizes}) -> {made} {{
  %empty = tensor.empty({unknown}) : {made}
  %made = linalg.generic {{indexing_maps = [{maps}], iterator_types = [{loops}]}}
      ins({names} : {kinds}) outs(%empty : {made}) {{
  ^bb0({numbers}, %out: {dtype}):
    {body}
    linalg.yield %y : {dtype}
  }} -> {made}
  return %made : {made}
}}
"""


def reordered(value: Any, order: Sequence[int]) -> Any:
    """Return a tensor with its dimensions in another order.

    Args:
        value: the tensor.
        order: for each dimension of the result, which one of the tensor's it is.
    """
    sizes, dtype = sizes_of(value.type), str(value.type.element_type)
    unknown = [d for d in order if sizes[d] is None]
    text = _REORDERED.format(
        x=value.type,
        y=tensor([sizes[d] for d in order], dtype),
        order=list(order),
        **_names(unknown),
    )
    (result,) = put(text, [value, *(size_of(value, d) for d in unknown)])
    return result


def padded(value: Any, low: Sequence[int], high: Sequence[int], fill: Any) -> Any:
    """Return a tensor with numbers put around its own.

    Args:
        value: the tensor.
        low, high: along each dimension, how many are put before, and after.
        fill: each of them.
    """
    more = zip(sizes_of(value.type), low, high, strict=True)
    sizes = [None if size is None else size + before + after for size, before, after in more]
    text = _PADDED.format(
        x=value.type,
        y=tensor(sizes, str(fill.type)),
        low=list(low),
        high=list(high),
        places=", ".join(f"%d{d}: index" for d, _ in enumerate(sizes)),
        dtype=fill.type,
    )
    (result,) = put(text, [value, fill])
    return result


def reshaped(value: Any, sizes: Sequence[int | None], dims: Sequence[Sequence[int]]) -> Any:
    """Return a tensor in another shape, where dimensions of one are each some of the other.

    Args:
        value: the tensor, of known sizes if the result has more dimensions.
        sizes: of the result.
        dims: for each dimension of the shorter shape, which of the longer it is.
    """
    is_longer = len(sizes) > len(dims)
    text = _RESHAPED.format(
        op="expand_shape" if is_longer else "collapse_shape",
        dims=[list(d) for d in dims],
        sizes=f"output_shape {list(sizes)}" if is_longer else "",
        x=value.type,
        y=tensor(sizes, str(value.type.element_type)),
    )
    (result,) = put(text, [value])
    return result


def squeezed(value: Any, dims: Collection[int]) -> Any:
    """Return a tensor without those of some dimensions that are of one element."""
    sizes = sizes_of(value.type)
    kept = [d for d, size in enumerate(sizes) if size != 1 or d not in dims]
    if len(kept) == len(sizes):
        return value
    begins = [0, *kept[1:], len(sizes)]
    merged = [list(range(*pair)) for pair in itertools.pairwise(begins)]
    return reshaped(value, [sizes[d] for d in kept], merged)


def computed(value: Any, dtype: str, body: str, **given: Any) -> Any:
    """Return a tensor of what is computed of each number of another.

    Args:
        value: the other tensor.
        dtype: of the result.
        body: ops that compute `%y` of the number, `%x`.
        given: numbers that the ops take, too, by their names.
    """
    sizes, read = sizes_of(value.type), {"x": value, **given}
    unknown = [d for d, size in enumerate(sizes) if size is None]
    loops = ", ".join(f"d{d}" for d, _ in enumerate(sizes))
    each, once = f"affine_map<({loops}) -> ({loops})>", f"affine_map<({loops}) -> ()>"
    kinds = {f"%all_{name}": str(number.type) for name, number in read.items()}
    numbers = {"%x": str(value.type.element_type), **{f"%{n}": str(given[n].type) for n in given}}
    text = _COMPUTED.format(
        arguments=", ".join(f"{name}: {kind}" for name, kind in kinds.items()),
        made=tensor(sizes, dtype),
        maps=", ".join([each, *(once for _ in given), each]),
        loops=", ".join('"parallel"' for _ in sizes),
        names=", ".join(kinds),
        kinds=", ".join(kinds.values()),
        numbers=", ".join(f"{name}: {kind}" for name, kind in numbers.items()),
        dtype=dtype,
        body=body,
        **_names(unknown),
    )
    (result,) = put(text, [*read.values(), *(size_of(value, d) for d in unknown)])
    return result


def _names(unknown: Iterable[int]) -> dict[str, str]:
    """Name the sizes of dimensions: as arguments of a function, and where they are used."""
    names = [f"%n{d}" for d in unknown]
    return {"sizes": "".join(f", {n}: index" for n in names), "unknown": ", ".join(names)}


def size_of(value: Any, dim: int) -> Any:
    """Give the size of a tensor's dimension at the insertion point."""
    from iree.compiler import ir

    return ir.Operation.create(
        "tensor.dim", results=[ir.IndexType.get()], operands=[value, index_of(dim)]
    ).result


def index_of(number: int) -> Any:
    """Give a number as an index at the insertion point."""
    from iree.compiler import ir

    index = ir.IndexType.get()
    return ir.Operation.create(
        "arith.constant", results=[index], attributes={"value": ir.IntegerAttr.get(index, number)}
    ).result

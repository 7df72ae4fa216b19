"""Write what follows an op in a device program as of tiles of the op's result."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowering.stages.ir.device_programs import STORE, is_at, is_loaded, sizes_in_program
from lowering.stages.ir.structured import inputs_of, is_elementwise, loops_of, maps_of
from lowering.stages.ir.symbols import maker_of
from lowering.stages.ir.templates import put
from lowering.stages.ir.types import dtype_of, tensor

_LOAD_TILE = """
func.func @load(%from: {whole}{arguments}) -> {tile} {{
  %tile = iree_tensor_ext.dispatch.tensor.load %from, offsets = [{offsets}], sizes = [{sizes}],
      strides = [{ones}] : {whole}{unknown} -> {tile}
  return %tile : {tile}
}}
"""
_STORE_TILE = """
func.func @store(%to: {whole}, %tile: {tile}{arguments}) {{
  iree_tensor_ext.dispatch.tensor.store %tile, %to, offsets = [{offsets}], sizes = [{sizes}],
      strides = [{ones}] : {tile} -> {whole}{unknown}
  return
}}
"""
_EMPTY = """
func.func @empty() -> {tile} {{
  %empty = tensor.empty() : {tile}
  return %empty : {tile}
}}
"""


@dataclass(frozen=True)
class Tile:
    """A part of a tensor.

    Attributes:
        sizes: along each dimension of the tensor.
        place: where it begins, as values; None: at the begin of a dimension.
    """

    sizes: Sequence[int]
    place: Sequence[Any]

    @classmethod
    def whole(cls, sizes: Sequence[int]) -> Tile:
        """Return that which is all of a tensor."""
        return cls(sizes, [None] * len(sizes))

    @property
    def kept(self) -> list[int]:
        """The dimensions of the tensor that the tile has: along the others it is at one place."""
        pairs = enumerate(zip(self.sizes, self.place, strict=True))
        return [d for d, (size, at) in pairs if at is None or size > 1]

    def along(self, dims: Sequence[int]) -> Tile:
        """Return that of a tensor that has these of the dimensions."""
        return Tile([self.sizes[d] for d in dims], [self.place[d] for d in dims])

    def kind(self, dtype: str) -> str:
        """Write its type, of a dtype by its name in MLIR."""
        return tensor([self.sizes[d] for d in self.kept], dtype)

    def load(self, source: Any, dtype: str) -> Any:
        """Load it from an argument of the function, at the insertion point."""
        (tile,) = self._move(_LOAD_TILE, source, dtype)
        return tile

    def store(self, value: Any, target: Any) -> None:
        """Store a value there."""
        self._move(_STORE_TILE, target, dtype_of(value), value)

    def _move(self, template: str, whole: Any, dtype: str, *values: Any) -> list[Any]:
        given, sizes = [at for at in self.place if at is not None], sizes_in_program(whole)
        names, unknown = iter(range(len(given))), [f"%n{i}" for i, _ in enumerate(sizes)]
        text = template.format(
            whole=whole.type,
            tile=self.kind(dtype),
            arguments="".join(
                f", {name}: index" for name in [*(f"%at{i}" for i, _ in enumerate(given)), *unknown]
            ),
            unknown=f"{{{', '.join(unknown)}}}" if unknown else "",
            offsets=", ".join("0" if at is None else f"%at{next(names)}" for at in self.place),
            sizes=", ".join(map(str, self.sizes)),
            ones=", ".join("1" for _ in self.sizes),
        )
        return put(text, [whole, *values, *given, *sizes])


def can_be_tiled(ops: Iterable[Any], value: Any) -> bool:
    """Say whether ops compute on a value number by number, and store only what they so compute.

    Args:
        ops: what follows the maker of the value in a function, but for what loads and what makes
            constants and empty tensors.
        value: of any rank; all that is computed has its shape.
    """
    tiled, rank = {value}, len(value.type.shape)
    for op in ops:
        if not (_stores_whole(op, tiled, rank) or _computes_tiles(op, tiled, rank)):
            return False
        tiled.update(op.results)
    return True


def write_tiled(ops: Iterable[Any], value: Any, part: Any, tile: Tile) -> None:
    """Write ops that can be tiled, at the insertion point; bodies of old ones go to new ones.

    Args:
        ops, value: as in `can_be_tiled`.
        part: of the value.
        tile: where that is.
    """
    parts = {value: part}
    for op in ops:
        with op.location:
            if op.name == STORE:
                tile.store(parts[op.operands[0]], op.operands[1])
            else:
                parts.update(zip(op.results, _computed(op, parts, tile), strict=True))


def _computed(op: Any, parts: Mapping[Any, Any], tile: Tile) -> list[Any]:
    from iree.compiler import ir

    kept = tile.kept
    operands, reads = list[Any](), list[Sequence[int]]()
    for value, along in zip(inputs_of(op), maps_of(op), strict=False):
        dims = [loop for loop in loops_of(along) if loop is not None]
        if value in parts:
            operands.append(parts[value])
        else:
            operands.append(tile.along(dims).load(value.owner.operands[0], dtype_of(value)))
        reads.append([kept.index(d) for d in dims if d in kept])
    made = list[Any]()
    for result in op.results:
        made += put(_EMPTY.format(tile=tile.kind(dtype_of(result))), [])
        reads.append(range(len(kept)))
    maps = [
        ir.AffineMap.get(len(kept), 0, [ir.AffineDimExpr.get(d) for d in dims]) for dims in reads
    ]
    kinds = [op.attributes["iterator_types"][d] for d in kept]
    new = ir.Operation.create(
        "linalg.generic",
        results=[value.type for value in made],
        operands=[*operands, *made],
        attributes={
            "indexing_maps": ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in maps]),
            "iterator_types": ir.ArrayAttr.get(kinds),
            "operandSegmentSizes": op.attributes["operandSegmentSizes"],
        },
        regions=1,
    )
    op.regions[0].blocks[0].append_to(new.regions[0])
    return list(new.results)


def _stores_whole(op: Any, tiled: Collection[Any], rank: int) -> bool:
    return op.name == STORE and op.operands[0] in tiled and is_at(op, [0] * rank)


def _computes_tiles(op: Any, tiled: Collection[Any], rank: int) -> bool:
    """Say whether an op computes from some values, and others that are loaded, number by number."""
    if not is_elementwise(op) or _reads_more(op):
        return False
    inputs, whole, loops = inputs_of(op), list(range(rank)), [*map(loops_of, maps_of(op))]
    read, made = loops[: len(inputs)], loops[len(inputs) :]
    return all(dims == whole for dims in made) and all(
        dims == whole if value in tiled else None not in dims and is_loaded(value)
        for value, dims in zip(inputs, read, strict=True)
    )


def _reads_more(op: Any) -> bool:
    """Say whether the body of an op reads more than numbers of its inputs, and constants."""
    (block,) = op.regions[0].blocks
    body = [inner.operation for inner in block.operations]
    inputs = list(block.arguments)[: len(inputs_of(op))]
    known = {*inputs, *(result for inner in body for result in inner.results)}
    read = [value for inner in body for value in inner.operands if value not in known]
    has_index = any(inner.name == "linalg.index" for inner in body)
    return has_index or any(maker_of(value) != "arith.constant" for value in read)

"""Read what device programs compute row by row from their functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowering.stages.flow.rows.combiners import COMBINERS, neutral
from lowering.stages.flow.rows.graph import (
    Access,
    Compute,
    Constant,
    Multiply,
    Reduce,
    RowGraph,
    Source,
    Value,
)
from lowering.stages.ir.device_programs import LOAD, STORE, argument_of, is_whole
from lowering.stages.ir.factors import TO_FLOAT
from lowering.stages.ir.sizes import Size, product, sizes_in
from lowering.stages.ir.structured import inputs_of, loops_of, maps_of
from lowering.stages.ir.symbols import maker_of, ops_of
from lowering.stages.linalg.read_in_panels import PANELS

DTYPES = frozenset({"f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64"})  # of tensors
# What is done to halves; their arithmetic IREE writes in floats, of vectors wrongly.
_HALVES = frozenset({"f16", "bf16"})
_OF_HALVES = frozenset({"arith.extf", "arith.truncf", "arith.select"})
# What may stop the process where a vector is beyond the end of a row, and has zeros.
_DIVISIONS = ("divsi", "divui", "remsi", "remui", "ceildiv", "floordiv")
_TRAPS = ("math.ipowi", *(f"arith.{op}" for op in _DIVISIONS))
_SOFTMAX = "linalg.softmax"
_PRODUCT_LOOPS = [[0, 3], [1, 3, 2], [0, 1, 2]]  # of rows, panels, and sums
_FREE = frozenset({"arith.constant", "tensor.empty", "func.return"})
_TELLS_SIZES = frozenset({"iree_tensor_ext.dispatch.workload.ordinal", "flow.dispatch.tie_shape"})

Shape = tuple[Size, Size]  # how many rows, of how many numbers
Loader = Callable[[int, Source], int | None]


def shape_of_rows(function: Any, given: Sequence[Any]) -> Shape | None:
    """Return how many rows of how many numbers a function reduces, or makes as a product.

    None if it does neither.

    Args:
        function: of a device program.
        given: what that is dispatched with.
    """
    for op in ops_of(function):
        name, sizes = op.name, None
        if PANELS in op.attributes and (loops := _sizes(op, given)) is not None:
            return loops[0], product(loops[1:-1])
        if name == "linalg.generic" and "reduction" in str(op.attributes["iterator_types"]):
            sizes = _sizes(op, given)
        elif name == _SOFTMAX:
            sizes = sizes_in(op.operands[0], given)
        if sizes is not None:
            *rows, columns = sizes
            return product(rows), columns
    return None


def read(
    function: Any, given: Sequence[Any], shape: Shape, graph: RowGraph, load: Loader
) -> dict[int, Value] | None:
    """Add what a function computes to a graph.

    Args:
        function: one block; it loads and stores whole tensors.
        given: what it is dispatched with.
        shape: of the rows.
        graph: gets the nodes.
        load: returns the node that an argument is, read so; None if it is another tensor.

    Returns:
        What is stored, by the arguments that it is stored to; None: the function does more than to
        compute row by row, or not of rows as the graph has. The graph may then have some nodes.
    """
    (block,) = function.regions[0].blocks
    reader = _Reader(graph, given, *shape, load, list(block.arguments))
    for op in block.operations:
        if not reader.take(op.operation):
            return None
    return reader.stored


@dataclass
class _Reader:
    graph: RowGraph
    given: Sequence[Any]
    rows: Size
    columns: Size
    load: Loader
    arguments: Sequence[Any]
    stored: dict[int, Value] = field(default_factory=dict)
    _values: dict[Any, Value] = field(default_factory=dict)
    _fills: dict[Any, int] = field(default_factory=dict)

    def take(self, op: Any) -> bool:
        """Add what an op computes; say whether it could be."""
        if op.name == LOAD:
            return is_whole(op) and _is_plain(op.results[0].type)
        if op.name in _FREE or op.name in _TELLS_SIZES:
            return True
        if op.name == "linalg.fill":
            return self._take_fill(op)
        if op.name == STORE:
            return self._take_store(op)
        if op.name == _SOFTMAX:
            return self._take_softmax(op)
        if PANELS in op.attributes:
            return self._take_product(op)
        return op.name == "linalg.generic" and self._take_generic(op)

    def _take_fill(self, op: Any) -> bool:
        if maker_of(op.operands[0]) != "arith.constant":
            return False
        self._fills[op.results[0]] = self._constant(op.operands[0])
        return True

    def _take_store(self, op: Any) -> bool:
        value, target = op.operands[0], op.operands[1]
        if value not in self._values or not is_whole(op):
            return False
        self.stored[argument_of(target).arg_number] = self._values[value]
        return str(value.type.element_type) in DTYPES

    def _take_softmax(self, op: Any) -> bool:
        kind, sizes = op.operands[0].type, sizes_in(op.operands[0], self.given)
        is_last = op.attributes["dimension"].value == kind.rank - 1
        if not (is_last and str(kind.element_type) == "f32" and self._fits(sizes)):
            return False
        x = self._read(op.operands[0], Access.LINE)
        if x is None:
            return False
        largest = self._reduce("arith.maximumf", x)
        apart = self.graph.add(Compute("arith.subf", (x, largest), "", "f32"))
        part = self.graph.add(Compute("math.exp", (apart,), "", "f32"))
        total = self._reduce("arith.addf", part)
        quotient = self.graph.add(Compute("arith.divf", (part, total), "", "f32"))
        self._values[op.results[0]] = Value(quotient, Access.LINE)
        return True

    def _reduce(self, name: str, operand: int) -> int:
        """Add the reduction of a node of float32 that starts from nothing."""
        start = self.graph.add(Constant(neutral(name, "f32"), "f32"))
        return self.graph.add(Reduce(name, operand, start, "", "f32"))

    def _take_product(self, op: Any) -> bool:
        """Add the product of a matrix by panels (`lowering.stages.linalg.read_in_panels`)."""
        factor, panels = inputs_of(op)
        is_loaded = all(maker_of(value) == LOAD for value in (factor, panels))
        if not (is_loaded and op.operands[-1] in self._fills and _is_as_written(op)):
            return False
        (count, depth, width), dtype = panels.type.shape, str(panels.type.element_type)
        sources = (
            (factor, Source(Access.FACTOR, "f32", (depth,))),
            (panels, Source(Access.PANELS, dtype, (count, depth, width))),
        )
        nodes = [self.load(self._argument(value), source) for value, source in sources]
        first, second = nodes
        if first is None or second is None:
            return False
        node = self.graph.add(Multiply(first, second, op.attributes[PANELS].value))
        self._values[op.results[0]] = Value(node, Access.LINE)
        return True

    def _argument(self, value: Any) -> int:
        """Return which argument of the function a value is loaded from."""
        return int(argument_of(value.owner.operands[0]).arg_number)

    def _take_generic(self, op: Any) -> bool:
        kinds = ["reduction" in str(kind) for kind in op.attributes["iterator_types"]]
        sizes, maps = _sizes(op, self.given), [m for m in _maps(op) if m is not None]
        if sizes is None or any(kinds[:-1]) or len(maps) < len(op.operands):
            return False
        is_reduction, made = bool(kinds) and kinds[-1], maps[len(inputs_of(op)) :]
        loops = list(range(len(sizes)))
        result = self._access(loops, sizes) if not is_reduction else Access.ROW
        if result is None or any(m != (loops[:-1] if is_reduction else loops) for m in made):
            return False
        if is_reduction and not self._fits(sizes):
            return False
        nodes = list[int]()
        for value, loops_of_value in zip(inputs_of(op), maps, strict=False):
            access = self._access(loops_of_value, sizes)
            node = None if access is None else self._read(value, access)
            if node is None:
                return False
            nodes.append(node)
        found = self._reduced(op, nodes) if is_reduction else self._computed(op, nodes)
        if found is None:
            return False
        for value, node in zip(op.results, found, strict=True):
            self._values[value] = Value(node, result)
        return True

    def _fits(self, sizes: Sequence[Size] | None) -> bool:
        if not sizes:
            return False
        *rows, columns = sizes
        return (product(rows), columns) == (self.rows, self.columns)

    def _access(self, read: Sequence[int], sizes: Sequence[Size]) -> Access | None:
        """Return what a tensor is that some loops go over; None if it is none of these.

        If there is one row, all tensors are of rows: IREE drops dimensions of one.

        Args:
            read: the loops, of its dimensions.
            sizes: of all loops.
        """
        loops, count = list(range(len(sizes))), product(sizes)
        is_line = count == product((self.rows, self.columns))
        if not is_line and count != self.rows:
            return None
        if not read:
            return Access.ROW if self.graph.rows == 1 else Access.ONE
        if list(read) == loops:
            return Access.LINE if is_line else Access.ROW
        if not is_line:
            return None
        for first in reversed(loops):  # that may be of columns
            if product(sizes[first:]) != self.columns:
                continue
            if list(read) == loops[:first]:
                return Access.ROW
            if list(read) == loops[first:]:
                return Access.LINE if self.graph.rows == 1 else Access.COLUMN
        return None

    def _read(self, value: Any, access: Access) -> int | None:
        """Return the node of a tensor that is read so; None if it holds something else."""
        if value in self._fills:
            return self._fills[value]
        if maker_of(value) == LOAD:
            return self.load(self._argument(value), Source(access, str(value.type.element_type)))
        held = self._values.get(value)
        return held.node if held is not None and held.access is access else None

    def _reduced(self, op: Any, nodes: Sequence[int]) -> list[int] | None:
        """Return the nodes of what an op reduces along the last loop."""
        block = op.regions[0].blocks[0]
        starts = list(block.arguments)[len(nodes) :]
        *body, end = (inner.operation for inner in block.operations)
        combiners = [value.owner for value in end.operands]
        if any(maker_of(value) not in COMBINERS for value in end.operands):
            return None
        rest = [inner for inner in body if inner not in combiners]
        values = self._body(rest, dict(zip(block.arguments, nodes, strict=False)))
        fills = [v for v in list(op.operands)[len(nodes) :] if v in self._fills]
        if values is None or len(fills) < len(starts):
            return None
        found = list[int]()
        for combiner, start, value in zip(combiners, starts, fills, strict=True):
            others = [other for other in combiner.operands if other != start]
            if len(others) != 1 or (operand := self._number(others[0], values)) is None:
                return None
            dtype, attributes = str(combiner.results[0].type), _attributes(combiner)
            if dtype not in DTYPES - _HALVES:
                return None
            found.append(
                self.graph.add(
                    Reduce(combiner.name, operand, self._fills[value], attributes, dtype)
                )
            )
        return found

    def _computed(self, op: Any, nodes: Sequence[int]) -> list[int] | None:
        """Return the nodes of what an op computes number by number."""
        block = op.regions[0].blocks[0]
        *body, end = (inner.operation for inner in block.operations)
        values = self._body(body, dict(zip(block.arguments, nodes, strict=False)))
        if values is None:
            return None
        found = [self._number(value, values) for value in end.operands]
        return None if None in found else [node for node in found if node is not None]

    def _body(self, ops: Sequence[Any], values: dict[Any, int]) -> dict[Any, int] | None:
        """Add the ops of a body; return the nodes of what they make, and of `values`."""
        for op in ops:
            if op.name == "arith.constant":
                continue
            is_known = op.name.startswith(("arith.", "math.")) and len(op.results) == 1
            if not is_known or op.name.startswith(_TRAPS):
                return None
            read = [self._number(operand, values) for operand in op.operands]
            if None in read:
                return None
            operands = tuple(node for node in read if node is not None)
            dtype = str(op.results[0].type)
            kinds = {dtype, *(self.graph.nodes[node].dtype for node in operands)}
            if kinds & _HALVES and op.name not in _OF_HALVES:
                return None
            if not kinds <= DTYPES | {"i1"}:
                return None
            values[op.results[0]] = self.graph.add(
                Compute(op.name, operands, _attributes(op), dtype)
            )
        return values

    def _number(self, value: Any, values: Mapping[Any, int]) -> int | None:
        if value in values:
            return values[value]
        if value in self.arguments:
            place, dtype = self.arguments.index(value), str(value.type)
            return self.load(place, Source(Access.NUMBER, dtype)) if dtype in DTYPES else None
        return self._constant(value) if maker_of(value) == "arith.constant" else None

    def _constant(self, value: Any) -> int:
        number = str(value.owner.attributes["value"]).partition(" : ")[0]
        return self.graph.add(Constant(number, str(value.type)))


def _attributes(op: Any) -> str:
    return ", ".join(f"{name} = {op.attributes[name]}" for name in op.attributes)


def _is_as_written(op: Any) -> bool:
    """Say whether a product is still what was marked: IREE may have it read a factor transposed."""
    body = [inner.name for inner in ops_of(op)]
    widens = TO_FLOAT.get(str(op.operands[1].type.element_type))
    written = [*([widens] if widens else []), "arith.mulf", "arith.addf", "linalg.yield"]
    return _maps(op) == _PRODUCT_LOOPS and body == written


def _is_plain(kind: Any) -> bool:
    """Say whether a tensor lies as it is written, and has numbers of a dtype."""
    return kind.encoding is None and str(kind.element_type) in DTYPES


def _sizes(op: Any, given: Sequence[Any]) -> list[Size] | None:
    """Return the sizes of the loops of a `linalg.generic`; None if they are not known to the host.

    What an op makes tells them first: sizes that the host knows to be one may be two values.
    """
    sizes = dict[int, Size]()
    for value, loops in reversed(list(zip(op.operands, _maps(op), strict=True))):
        of_value = sizes_in(value, given) if loops else []
        if of_value is None:
            return None
        for loop, size in zip(loops or (), of_value, strict=True):
            sizes.setdefault(loop, size)
    return [sizes.get(loop, Size(0)) for loop in range(len(op.attributes["iterator_types"]))]


def _maps(op: Any) -> list[list[int] | None]:
    """Return the loops that each operand of an op goes over; None: other than one a dimension."""
    found = map(loops_of, maps_of(op))
    return [None if None in loops else loops for loops in found]  # type: ignore[misc]

"""What is computed of each row of a matrix: a graph of numbers, some of them reduced along it."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

# Ops that cost no more than to load what they make.
_CHEAP = (
    "arith.add",
    "arith.sub",
    "arith.mul",
    "arith.neg",
    "arith.ext",
    "arith.trunc",
    "arith.cmp",
    "arith.select",
    "arith.max",
    "arith.min",
)
_MOST_CHEAP = 4  # of these, one after the other


class Access(enum.Enum):
    """Which dimensions a tensor has: rows and columns, one of them, or none; or it is a number.

    The factors of a product have others: one has rows, too.
    """

    LINE = enum.auto()
    ROW = enum.auto()
    COLUMN = enum.auto()
    ONE = enum.auto()
    NUMBER = enum.auto()
    FACTOR = enum.auto()
    PANELS = enum.auto()


@dataclass(frozen=True)
class Source:
    """A tensor that is loaded or stored, or a number that is taken.

    Attributes:
        access: to it.
        dtype: of its numbers.
        sizes: of a factor, along the dimensions that are no rows.
    """

    access: Access
    dtype: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Value:
    """What a tensor holds: a node, along some dimensions."""

    node: int
    access: Access


@dataclass(frozen=True)
class Load:
    """A number of the tensor that is an argument of the program."""

    argument: int
    source: Source

    @property
    def dtype(self) -> str:
        """Return the dtype of the tensor."""
        return self.source.dtype


@dataclass(frozen=True)
class Constant:
    """A number, as MLIR writes it."""

    number: str
    dtype: str


@dataclass(frozen=True)
class Compute:
    """An op on numbers.

    Attributes:
        name: in MLIR.
        operands: nodes.
        attributes: as MLIR writes them.
        dtype: of the result.
    """

    name: str
    operands: tuple[int, ...]
    attributes: str
    dtype: str


@dataclass(frozen=True)
class Reduce:
    """What the numbers of a row are combined to.

    Attributes:
        name: of the op that combines two, in MLIR.
        operand: the node.
        start: the node that is combined, too.
        attributes: of the op, as MLIR writes them.
        dtype: of the result.
    """

    name: str
    operand: int
    start: int
    attributes: str
    dtype: str


@dataclass(frozen=True)
class Multiply:
    """The product of a row of one factor by the other, which lies in panels.

    Attributes:
        factor, panels: nodes.
        height: rows, at most, that registers hold the sums of, for one panel.
        dtype: of the result.
    """

    factor: int
    panels: int
    height: int
    dtype: str = "f32"


Node = Load | Constant | Compute | Reduce | Multiply


@dataclass(frozen=True)
class RowGraph:
    """What is computed of each of some rows, of so many numbers.

    A node is known by its place; equal nodes are one.

    Attributes:
        rows, columns: how many rows, of how many numbers; None: it is known when it is run.
        nodes: each after those that it reads.
        levels: of the nodes: which pass over the row may be the first that reads one. What depends
            on a reduction comes after the pass that the reduction takes.
    """

    rows: int | None
    columns: int | None
    nodes: list[Node] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    _lines: list[bool] = field(default_factory=list)
    _places: dict[Node, int] = field(default_factory=dict)

    def copy(self) -> RowGraph:
        """Return the graph, to add nodes to."""
        parts = list(self.nodes), list(self.levels), list(self._lines), dict(self._places)
        return RowGraph(self.rows, self.columns, *parts)

    def add(self, node: Node) -> int:
        """Add a node, if it is not there; return its place."""
        if node not in self._places:
            self._places[node] = len(self.nodes)
            read = list(operands_of(node))
            self.levels.append(
                max((self.levels[i] for i in read), default=0) + isinstance(node, Reduce)
            )
            self._lines.append(
                node.source.access in (Access.LINE, Access.COLUMN)
                if isinstance(node, Load)
                else isinstance(node, Multiply)
                or (not isinstance(node, Reduce) and any(self._lines[i] for i in read))
            )
            self.nodes.append(node)
        return self._places[node]

    def is_line(self, place: int) -> bool:
        """Say whether a node differs along a row."""
        return self._lines[place]

    @property
    def dimensions(self) -> list[tuple[str, int | None]]:
        """What the dimensions are called here, and their sizes."""
        return [("rows", self.rows), ("columns", self.columns)]

    def sizes_of(self, source: Source) -> list[tuple[str, int | None]]:
        """Return the dimensions of a tensor, and their sizes."""
        rows, columns = self.dimensions
        known: list[tuple[str, int | None]] = [("", size) for size in source.sizes]
        return {
            Access.LINE: [rows, columns],
            Access.ROW: [rows],
            Access.COLUMN: [columns],
            Access.FACTOR: [rows, *known],
        }.get(source.access, known)

    def unknown(self, source: Source | None = None) -> list[str]:
        """Return the dimensions that are known when it is run: of a tensor, or of all."""
        dimensions = self.dimensions if source is None else self.sizes_of(source)
        return [name for name, size in dimensions if size is None]

    def source_of(self, value: Value) -> Source:
        """Return what a tensor is that holds a value."""
        return Source(value.access, self.nodes[value.node].dtype)

    def reductions(self) -> list[tuple[int, Reduce]]:
        """Return the nodes that are reductions, with their places."""
        return [(place, node) for place, node in enumerate(self.nodes) if isinstance(node, Reduce)]

    def products(self) -> list[tuple[int, Multiply]]:
        """Return the nodes that are products, with their places."""
        return [(i, node) for i, node in enumerate(self.nodes) if isinstance(node, Multiply)]

    def kept(self, outputs: Sequence[int], most: int) -> dict[int, int]:
        """Return what is stored when it is computed, because a later pass reads it.

        Args:
            outputs: what is stored in any case.
            most: bytes of what is stored for that alone; beyond it, nodes are computed again.

        Returns:
            Nodes -> whose tensor they lie in: their own, or that of an output which is stored over
            them, number by number, by the last pass that reads them.
        """
        found, free = {place: place for place in outputs}, list(dict.fromkeys(outputs))
        read, needed = self._last_passes(again=False), self._last_passes(again=True)
        for place, node in enumerate(self.nodes):
            if place in found or not (isinstance(node, Compute) and self.is_line(place)):
                continue
            is_late = read[place] > self.levels[place]
            if not is_late or node.dtype == "i1" or self._cost(place, found) is not None:
                continue
            over = [
                output
                for output in free
                if self.nodes[output].dtype == node.dtype
                and self.levels[place] < self.levels[output]
                and needed[place] <= self.levels[output]
            ]
            width = max(1, int(node.dtype.lstrip("bfi")) // 8)
            if over:
                found[place] = over[0]
                free.remove(over[0])
            elif self.columns is not None and self.columns * width <= most:
                found[place] = place
                most -= self.columns * width
        return found

    def _last_passes(self, *, again: bool) -> list[int]:
        """Return the last pass in which each node is read by another.

        Args:
            again: also to compute others again, in any pass that reads these.
        """
        last = [0] * len(self.nodes)
        for user in reversed(range(len(self.nodes))):
            node = self.nodes[user]
            reads = self.levels[user] - isinstance(node, Reduce)
            is_again = again or node.dtype == "i1"  # truths are never kept
            if is_again and not isinstance(node, Reduce):
                reads = max(reads, last[user])
            for place in operands_of(node):
                last[place] = max(last[place], reads)
        return last

    def _cost(self, place: int, kept: Collection[int]) -> int | None:
        """Return how many ops compute a node again; None: more than it is worth."""
        node = self.nodes[place]
        if place in kept or not isinstance(node, Compute) or not self.is_line(place):
            return 0
        if not node.name.startswith(_CHEAP):
            return None
        total = 1
        for operand in node.operands:
            if (cost := self._cost(operand, kept)) is None:
                return None
            total += cost
        return total if total <= _MOST_CHEAP else None


def operands_of(node: Node) -> tuple[int, ...]:
    """Return the nodes that a node reads."""
    if isinstance(node, Compute):
        return node.operands
    if isinstance(node, Multiply):
        return node.factor, node.panels
    return (node.operand, node.start) if isinstance(node, Reduce) else ()

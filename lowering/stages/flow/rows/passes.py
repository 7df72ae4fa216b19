"""Write a pass over a row: what is done to each vector of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lowering.stages.flow.rows.graph import Compute, Load, Reduce, RowGraph
from lowering.stages.flow.rows.text import Text

AT_ONCE = 4  # vectors: sums that do not wait for each other


@dataclass(frozen=True)
class Step:
    """Where in a row a vector is.

    Attributes:
        place: of its first number, as a value.
        mask: which of its numbers are in the row, as a value; None: all.
        slot: which of the accumulators it goes to.
        values: what there is of it: node -> its vector.
    """

    place: str
    mask: str | None
    slot: int
    values: dict[int, str]


@dataclass(frozen=True)
class Pass:
    """One pass over a row.

    Attributes:
        text: gets the ops.
        level: of the pass.
        kept: nodes that a pass stores -> tensors; they are read by passes of higher levels.
        under: nodes that this pass stores -> those that lie there until then.
        loaded: arguments -> tensors.
        vectors: what is one number of the row -> vectors of it.
    """

    text: Text
    level: int
    kept: Mapping[int, str]
    under: Mapping[int, int]
    loaded: Mapping[int, str]
    vectors: Mapping[int, str]

    @property
    def _graph(self) -> RowGraph:
        return self.text.graph

    @cached_property
    def reductions(self) -> dict[int, Reduce]:
        """The nodes that it reduces to, by their places."""
        after = self.level + 1
        return {i: n for i, n in self._graph.reductions() if self._graph.levels[i] == after}

    @cached_property
    def stored(self) -> list[int]:
        """The places of the nodes that it stores."""
        return [place for place in self.kept if self._graph.levels[place] == self.level]

    def kinds(self) -> list[str]:
        """Write the types of what steps change: accumulators, and tensors."""
        nodes, text = self._graph.nodes, self.text
        sums = [text.vector(n.dtype) for n in self.reductions.values() for _ in range(AT_ONCE)]
        return [*sums, *(text.line(nodes[i].dtype) for i in self.stored)]

    def begin(self) -> list[str]:
        """Write what it is before the first step."""
        sums = [self.text.neutral(n) for n in self.reductions.values() for _ in range(AT_ONCE)]
        return [*sums, *(self.kept[place] for place in self.stored)]

    def step(self, step: Step, before: Sequence[str]) -> list[str]:
        """Write what is done to one vector; return what it leaves."""
        text, after, sums = self.text, list(before), len(self.reductions) * AT_ONCE
        for i, place in enumerate(self.stored, sums):
            if (old := self.under.get(place)) is not None:
                step.values[old] = self._read(before[i], self._graph.nodes[old].dtype, step)
        for r, node in enumerate(self.reductions.values()):
            slot = r * AT_ONCE + step.slot
            value = self._masked(self._value(node.operand, step), node, step)
            after[slot] = text.combine(node, value, after[slot], of_vectors=True)
        for i, place in enumerate(self.stored, sums):
            value, dtype = self._value(place, step), self._graph.nodes[place].dtype
            whole = step.mask is None
            after[i] = text.write(value, after[i], step.place, text.line(dtype), dtype, whole=whole)
        return after

    def needed(self) -> Collection[int]:
        """Return the numbers of the row that the pass computes vectors from."""
        reduced = [node.operand for node in self.reductions.values()]
        waiting, seen = [*reduced, *self.stored], set[int]()
        while waiting:
            place = waiting.pop()
            if place not in seen:
                seen.add(place)
                node = self._graph.nodes[place]
                if isinstance(node, Compute) and not self._is_read(place):
                    waiting += node.operands if self._graph.is_line(place) else ()
        return sorted(place for place in seen if not self._graph.is_line(place))

    def _is_read(self, place: int) -> bool:
        """Say whether a pass before has stored a node."""
        return place in self.kept and self._graph.levels[place] < self.level

    def _masked(self, value: str, node: Reduce, step: Step) -> str:
        """Write a vector that has nothing where it is beyond the end of the row."""
        text = self.text
        if step.mask is None:
            return value
        kinds = f"{text.vector('i1')}, {text.vector(node.dtype)}"
        return text.say(f"arith.select {step.mask}, {value}, {text.neutral(node)} : {kinds}")

    def _value(self, place: int, step: Step) -> str:
        """Write what a vector of a node is, if it is not there."""
        graph, values = self._graph, step.values
        if not graph.is_line(place):
            return self.vectors[place]
        if place not in values:
            node = graph.nodes[place]
            if isinstance(node, Load):
                values[place] = self._read(self.loaded[node.argument], node.dtype, step)
            elif self._is_read(place):
                values[place] = self._read(self.kept[place], node.dtype, step)
            else:
                assert isinstance(node, Compute)
                operands = [self._value(i, step) for i in node.operands]
                values[place] = self.text.compute(node, operands, of_vectors=True)
        return values[place]

    def _read(self, line: str, dtype: str, step: Step) -> str:
        kind, whole = self.text.line(dtype), step.mask is None
        return self.text.read(line, step.place, kind, dtype, whole=whole)

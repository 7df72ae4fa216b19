"""Lines of MLIR for what is computed of a row, in numbers and in vectors of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowering.stages.flow.rows.combiners import neutral
from lowering.stages.flow.rows.graph import Compute, Constant, Reduce, RowGraph
from lowering.stages.ir.types import tensor


@dataclass
class Text:
    """Ops, each on a line.

    Attributes:
        graph: what is computed.
        lanes: numbers of a vector.
        lines: what is written.
    """

    graph: RowGraph
    lanes: int
    lines: list[str] = field(default_factory=list)
    _count: int = 0

    def say(self, op: str) -> str:
        """Write an op of one result; return its name."""
        name = self.new("v")
        self.lines.append(f"{name} = {op}")
        return name

    def new(self, letter: str) -> str:
        """Return a name that no value has."""
        self._count += 1
        return f"%{letter}{self._count}"

    def compute(self, node: Compute, operands: Sequence[str], *, of_vectors: bool) -> str:
        """Write an op on numbers, or on vectors of them."""
        dtypes = [*(self.graph.nodes[i].dtype for i in node.operands), node.dtype]
        *read, made = map(self.vector, dtypes) if of_vectors else dtypes
        attributes = f" {{{node.attributes}}}" if node.attributes else ""
        return self.say(
            f'"{node.name}"({", ".join(operands)}){attributes} : ({", ".join(read)}) -> {made}'
        )

    def combine(self, node: Reduce, first: str, second: str, *, of_vectors: bool) -> str:
        """Combine two numbers, or vectors, to one."""
        kind = self.vector(node.dtype) if of_vectors else node.dtype
        attributes = f" {{{node.attributes}}}" if node.attributes else ""
        return self.say(
            f'"{node.name}"({first}, {second}){attributes} : ({kind}, {kind}) -> {kind}'
        )

    def number(self, node: Constant) -> str:
        """Write a number that is known."""
        kind = "" if node.dtype == "i1" else f" : {node.dtype}"  # `true` has its type
        return self.say(f"arith.constant {node.number}{kind}")

    def vector_of(self, number: str, dtype: str) -> str:
        """Write a vector of one number that is known."""
        return self.say(f"arith.constant dense<{number}> : {self.vector(dtype)}")

    def spread(self, number: str, dtype: str) -> str:
        """Write a vector of one number, which is a value."""
        return self.say(f"vector.broadcast {number} : {dtype} to {self.vector(dtype)}")

    def read(self, source: str, at: str, kind: str, dtype: str, *, whole: bool = True) -> str:
        """Read a vector of a tensor, of a type; it may end beyond that, unless it is whole."""
        beyond = self.say(f"arith.constant {'0.0' if 'f' in dtype else '0'} : {dtype}")
        return self.say(
            f"vector.transfer_read {source}[{at}], {beyond} {_bounds(whole=whole)} "
            f": {kind}, {self.vector(dtype)}"
        )

    def write(
        self, vector: str, target: str, at: str, kind: str, dtype: str, *, whole: bool = True
    ) -> str:
        """Write a vector into a tensor; return that."""
        return self.say(
            f"vector.transfer_write {vector}, {target}[{at}] {_bounds(whole=whole)} "
            f": {self.vector(dtype)}, {kind}"
        )

    def neutral(self, node: Reduce) -> str:
        """Write a vector that changes none that it is combined with."""
        return self.vector_of(neutral(node.name, node.dtype), node.dtype)

    def vector(self, dtype: str) -> str:
        """Write the type of a vector."""
        return f"vector<{self.lanes}x{dtype}>"

    def line(self, dtype: str) -> str:
        """Write the type of the tensor that is a row."""
        return tensor([self.graph.columns], dtype)


def _bounds(*, whole: bool) -> str:
    return f"{{in_bounds = [{'true' if whole else 'false'}]}}"

"""Write what is computed of rows as loops over vectors: a pass over the row for each reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowering.stages.flow.rows.combiners import COMBINERS
from lowering.stages.flow.rows.graph import (
    Access,
    Compute,
    Constant,
    Load,
    Reduce,
    RowGraph,
    Source,
    Value,
)
from lowering.stages.flow.rows.passes import AT_ONCE, Pass, Step
from lowering.stages.flow.rows.text import Text
from lowering.stages.ir.templates import tensor

_SHORT = 16  # vectors of a row that is computed without a loop, and stays in registers
_STACK = 16 << 10  # bytes of a row that a program keeps; IREE gives it 32 KB or more
_ITEM = 4096  # numbers of a work item, if a row has fewer
_FUNCTION = """
func.func @rows({arguments}) {{
  %first = arith.constant 0 : index
  %step = arith.constant 1 : index
  %block = arith.constant {block} : index
  %blocks = arith.constant {blocks} : index
  %item = flow.dispatch.workgroup.id[0] : index
  %begin = affine.apply affine_map<(d0) -> (d0 * {rows_of_item})>(%item)
  %end = affine.min affine_map<(d0) -> (d0 * {rows_of_item} + {rows_of_item}, {rows})>(%item)
{before}
  scf.for %row = %begin to %end step %step {{
{body}
  }}
  return
}}
"""


def rows_of_item(graph: RowGraph) -> int:
    """Return how many rows a work item computes."""
    return min(graph.rows, max(1, _ITEM // graph.columns))


def write(graph: RowGraph, sources: Sequence[Source], outputs: Sequence[Value], lanes: int) -> str:
    """Write a function that loads the sources and stores the outputs.

    Args:
        graph: what is computed.
        sources: its arguments.
        outputs: what the arguments after these get.
        lanes: numbers of a vector.
    """
    return _Writer(Text(graph, lanes), sources, outputs).program()


def arguments_of(graph: RowGraph, sources: Sequence[Source], outputs: Sequence[Value]) -> str:
    """Write the arguments of that function."""
    tensors = [("readonly", source) for source in sources]
    tensors += [("writeonly", graph.source_of(value)) for value in outputs]
    types = [_argument_type(graph, access, source) for access, source in tensors]
    return ", ".join(f"%a{i}: {kind}" for i, kind in enumerate(types))


def kind_of(graph: RowGraph, source: Source) -> str:
    """Write the type of a tensor that has some of the dimensions of a graph."""
    sizes = {
        Access.LINE: [graph.rows, graph.columns],
        Access.ROW: [graph.rows],
        Access.COLUMN: [graph.columns],
        Access.ONE: [],
    }
    return tensor(sizes[source.access], source.dtype)


def _argument_type(graph: RowGraph, access: str, source: Source) -> str:
    return f"!iree_tensor_ext.dispatch.tensor<{access}:{kind_of(graph, source)}>"


@dataclass
class _Writer:
    """What is written of a function, and what its values are called.

    Attributes:
        text: the ops.
        sources, outputs: as for `write`.
    """

    text: Text
    sources: Sequence[Source]
    outputs: Sequence[Value]
    _loaded: dict[int, str] = field(default_factory=dict)  # argument -> a tensor, or its row
    _numbers: dict[int, str] = field(default_factory=dict)  # node -> its number, of the row
    _vectors: dict[int, str] = field(default_factory=dict)  # node -> that in all lanes
    _kept: dict[int, str] = field(default_factory=dict)  # node -> the tensor of its row
    _held: dict[int, dict[int, str]] = field(default_factory=dict)  # place in a short row -> nodes

    def program(self) -> str:
        graph, text = self.text.graph, self.text
        self._load((Access.COLUMN, Access.ONE))
        for place, node in enumerate(graph.nodes):
            if isinstance(node, Constant):
                self._numbers[place] = text.number(node)
        before, text.lines = text.lines, []
        self._load((Access.LINE, Access.ROW))
        stored = [value.node for value in self.outputs if value.access is Access.LINE]
        kept = graph.kept(stored, most=0 if self._is_short else _STACK)
        for place in kept:
            self._kept[place] = text.say(f"tensor.empty() : {text.line(graph.nodes[place].dtype)}")
        self._compute(level=0)
        levels = [graph.levels[place] for place in kept]
        for level in range(max([0, *levels, *(n - 1 for n in graph.levels)]) + 1):
            self._pass_over(level)
            self._compute(level + 1)
        self._store()
        return _FUNCTION.format(
            arguments=arguments_of(graph, self.sources, self.outputs),
            block=self._block,
            blocks=self._whole,
            rows_of_item=rows_of_item(graph),
            rows=graph.rows,
            before="\n".join(before),
            body="\n".join(text.lines),
        )

    @property
    def _is_short(self) -> bool:
        return self.text.graph.columns <= self.text.lanes * _SHORT

    @property
    def _block(self) -> int:
        """The numbers that a loop takes at a time."""
        return self.text.lanes * AT_ONCE

    @property
    def _whole(self) -> int:
        """The numbers that loops take; what follows them takes the others."""
        return 0 if self._is_short else self.text.graph.columns // self._block * self._block

    def _load(self, accesses: Sequence[Access]) -> None:
        """Load the arguments that are read so: as a whole, or of one row."""
        graph, text = self.text.graph, self.text
        for i, source in enumerate(self.sources):
            if source.access in accesses:
                self._loaded[i] = text.say(
                    f"iree_tensor_ext.dispatch.tensor.load %a{i}, {self._where(source)} "
                    f": {_argument_type(graph, 'readonly', source)} -> {self._part(source)}"
                )
        for place, node in enumerate(graph.nodes):
            if isinstance(node, Load) and node.source.access in accesses:
                at = {Access.ROW: "%first", Access.ONE: ""}.get(node.source.access)
                if at is not None:
                    self._numbers[place] = text.say(
                        f"tensor.extract {self._loaded[node.argument]}[{at}] "
                        f": {self._part(node.source)}"
                    )

    def _store(self) -> None:
        """Store what is computed of the row."""
        graph, text = self.text.graph, self.text
        for i, value in enumerate(self.outputs, len(self.sources)):
            target = graph.source_of(value)
            kind = self._part(target)
            if value.access is Access.LINE:
                part = self._kept[value.node]
            else:
                part = text.say(f"tensor.from_elements {self._numbers[value.node]} : {kind}")
            text.lines.append(
                f"iree_tensor_ext.dispatch.tensor.store {part}, %a{i}, {self._where(target)} "
                f": {kind} -> {_argument_type(graph, 'writeonly', target)}"
            )

    def _where(self, source: Source) -> str:
        """Write which part of an argument is loaded or stored at a time."""
        columns = self.text.graph.columns
        offsets, sizes = {
            Access.LINE: ("%row, 0", f"1, {columns}"),
            Access.ROW: ("%row", "1"),
            Access.COLUMN: ("0", f"{columns}"),
            Access.ONE: ("", ""),
        }[source.access]
        steps = ", ".join("1" for _ in sizes.split(", ") if sizes)
        return f"offsets = [{offsets}], sizes = [{sizes}], strides = [{steps}]"

    def _part(self, source: Source) -> str:
        """Write the type of that part."""
        columns = self.text.graph.columns
        sizes = {Access.ROW: [1], Access.ONE: []}.get(source.access, [columns])
        return tensor(sizes, source.dtype)

    def _compute(self, level: int) -> None:
        """Compute what is one number of the row, and known before the pass of a level."""
        graph = self.text.graph
        for place, node in enumerate(graph.nodes):
            is_due = graph.levels[place] == level and not graph.is_line(place)
            if isinstance(node, Compute) and is_due:
                operands = [self._numbers[i] for i in node.operands]
                self._numbers[place] = self.text.compute(node, operands, of_vectors=False)

    def _pass_over(self, level: int) -> None:
        """Reduce, and store, what is known by the pass of a level."""
        graph, text = self.text.graph, self.text
        work = Pass(text, level, dict(self._kept), self._loaded, self._vectors)
        for place in work.needed():
            self._spread(place)
        state = work.begin()
        if self._whole:
            state = self._loop(work, state)
        for i, place in enumerate(range(self._whole, graph.columns, text.lanes)):
            at = text.say(f"arith.constant {place} : index")
            valid = min(text.lanes, graph.columns - place)
            values = self._held.setdefault(place, {}) if self._is_short else {}
            state = work.step(Step(at, valid, i % AT_ONCE, values), state)
        for r, (place, node) in enumerate(work.reductions.items()):
            self._numbers[place] = self._total(node, state[r * AT_ONCE : (r + 1) * AT_ONCE])
        self._kept.update(zip(work.stored, state[len(work.reductions) * AT_ONCE :], strict=True))

    def _loop(self, work: Pass, state: Sequence[str]) -> list[str]:
        """Write the part of a pass that takes blocks of vectors; return what it leaves."""
        text, kinds = self.text, ", ".join(work.kinds())
        name, counter = text.new("p"), text.new("at")
        inner = [text.new("s") for _ in state]
        pairs = ", ".join(f"{a} = {b}" for a, b in zip(inner, state, strict=True))
        text.lines.append(
            f"{name}:{len(state)} = scf.for {counter} = %first to %blocks step %block "
            f"iter_args({pairs}) -> ({kinds}) {{"
        )
        for slot in range(AT_ONCE):
            at = text.say(f"affine.apply affine_map<(d0) -> (d0 + {slot * text.lanes})>({counter})")
            inner = work.step(Step(at, text.lanes, slot, {}), inner)
        text.lines.append(f"scf.yield {', '.join(inner)} : {kinds}\n}}")
        return [f"{name}#{i}" for i in range(len(state))]

    def _spread(self, place: int) -> None:
        """Have all lanes hold a number of the row."""
        if place in self._vectors:
            return
        node, text = self.text.graph.nodes[place], self.text
        if isinstance(node, Constant):
            self._vectors[place] = text.vector_of(node.number, node.dtype)
        else:
            kinds = f"{node.dtype} to {text.vector(node.dtype)}"
            self._vectors[place] = text.say(f"vector.broadcast {self._numbers[place]} : {kinds}")

    def _total(self, node: Reduce, slots: Sequence[str]) -> str:
        """Combine the lanes of accumulators, and what the reduction starts from, to one number."""
        text, values = self.text, list(slots)
        while len(values) > 1:
            first, second, *values = values
            values.append(text.combine(node, first, second, of_vectors=True))
        order = " fastmath<reassoc>" if node.name.endswith("f") else ""
        total = text.say(
            f"vector.reduction <{COMBINERS[node.name]}>, {values[0]}{order} "
            f": {text.vector(node.dtype)} into {node.dtype}"
        )
        return text.combine(node, total, self._numbers[node.start], of_vectors=False)

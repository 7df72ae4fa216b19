"""Write what is computed of rows as loops over vectors: a pass over the row for each reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from lowering.stages.flow.rows.signature import arguments_of, write_sizes
from lowering.stages.flow.rows.tensors import Part, Tensors
from lowering.stages.flow.rows.text import Text
from lowering.stages.ir.types import tensor

_SHORT = 16  # vectors of a row that is computed without a loop, and stays in registers
_STACK = 16 << 10  # bytes of a row that a program keeps; IREE gives it 32 KB or more
_FUNCTION = """
func.func @rows({arguments}) {{
  %item = flow.dispatch.workgroup.id[0] : index
{sizes}
  %begin = arith.muli %item, %some : index
  %ahead = arith.addi %begin, %some : index
  %end = arith.minui %ahead, %rows : index
{before}
  scf.for %row = %begin to %end step %one {{
{body}
  }}
  return
}}
"""


def write(graph: RowGraph, sources: Sequence[Source], outputs: Sequence[Value], lanes: int) -> str:
    """Write a function that loads the sources and stores the outputs.

    Args:
        graph: what is computed.
        sources: its arguments, after the sizes that are not known.
        outputs: what the arguments after these get.
        lanes: numbers of a vector.
    """
    text = Text(graph, lanes)
    return _Writer(text, Tensors(text, sources, outputs)).program()


# Of a pass, what there is before, and where a step of a loop begins: write it; what it leaves.
_Steps = Callable[[Pass, list[str], str], list[str]]


@dataclass
class _Writer:
    """What is written of a function, and what its values are called.

    Attributes:
        text: the ops.
        tensors: the arguments.
    """

    text: Text
    tensors: Tensors
    _loaded: dict[int, str] = field(default_factory=dict)  # argument -> a tensor, or its row
    _numbers: dict[int, str] = field(default_factory=dict)  # node -> its number, of the row
    _vectors: dict[int, str] = field(default_factory=dict)  # node -> that in all lanes
    _kept: dict[int, str] = field(default_factory=dict)  # node -> the tensor of its row
    _under: dict[int, int] = field(default_factory=dict)  # node -> what lies in its place before
    _held: dict[int, dict[int, str]] = field(default_factory=dict)  # place in a short row -> nodes

    def program(self) -> str:
        graph, text = self.text.graph, self.text
        self.tensors.tie()
        self._load((Access.COLUMN, Access.ONE))
        for place, node in enumerate(graph.nodes):
            if isinstance(node, Constant):
                self._numbers[place] = text.number(node)
            elif isinstance(node, Load) and node.source.access is Access.NUMBER:
                self._numbers[place] = self.tensors.number(node.argument)
        self._count()
        before, text.lines = text.lines, []
        self._load((Access.LINE, Access.ROW))
        levels = self._keep()
        self._compute(level=0)
        for level in range(max([0, *levels, *(n - 1 for n in graph.levels)]) + 1):
            self._pass_over(level)
            self._compute(level + 1)
        self._store()
        return _FUNCTION.format(
            arguments=arguments_of(graph, self.tensors.sources, self.tensors.outputs),
            sizes=write_sizes(graph),
            before="\n".join(before),
            body="\n".join(text.lines),
        )

    def _count(self) -> None:
        """Say how many numbers of a row loops over blocks of vectors take."""
        text, whole = self.text, self._whole
        lines = [f"%block = arith.constant {text.lanes * AT_ONCE} : index"]
        if whole is not None:
            lines.append(f"%blocks = arith.constant {whole} : index")
        else:
            lines += [
                f"%lanes = arith.constant {text.lanes} : index",
                "%rest = arith.remui %columns, %block : index",
                "%blocks = arith.subi %columns, %rest : index",
            ]
        text.lines += lines

    def _keep(self) -> list[int]:
        """Begin the tensors of what passes store; return the levels of these passes."""
        graph, text = self.text.graph, self.text
        stored = [value.node for value in self.tensors.outputs if value.access is Access.LINE]
        own = {place: place for place in stored}
        kept = own if self._is_short else graph.kept(stored, _STACK)
        sizes = "" if graph.columns is not None else "%columns"
        for place, where in kept.items():
            if place == where:
                kind = text.line(graph.nodes[place].dtype)
                self._kept[place] = text.say(f"tensor.empty({sizes}) : {kind}")
        for place, where in kept.items():
            if place != where:
                self._kept[place], self._under[where] = self._kept[where], place
        return [graph.levels[place] for place in kept]

    @property
    def _is_short(self) -> bool:
        columns = self.text.graph.columns
        return columns is not None and columns <= self.text.lanes * _SHORT

    @property
    def _whole(self) -> int | None:
        """The numbers that loops over blocks take, if it is known."""
        columns, block = self.text.graph.columns, self.text.lanes * AT_ONCE
        if columns is None:
            return None
        return 0 if self._is_short else columns // block * block

    def _load(self, accesses: Sequence[Access]) -> None:
        """Load the arguments that are read so: as a whole, or of one row."""
        graph, text = self.text.graph, self.text
        for i, source in enumerate(self.tensors.sources):
            if source.access in accesses:
                self._loaded[i] = self.tensors.load(i, self._part(source.access))
        for place, node in enumerate(graph.nodes):
            if isinstance(node, Load) and node.source.access in accesses:
                at = {Access.ROW: "%zero", Access.ONE: ""}.get(node.source.access)
                if at is not None:
                    self._numbers[place] = text.say(
                        f"tensor.extract {self._loaded[node.argument]}[{at}] "
                        f": {tensor(self._part(node.source.access).shape, node.dtype)}"
                    )

    def _store(self) -> None:
        """Store what is computed of the row."""
        graph, text = self.text.graph, self.text
        for i, value in enumerate(self.tensors.outputs):
            part = self._part(value.access)
            if value.access is Access.LINE:
                stored = self._kept[value.node]
            else:
                kind = tensor(part.shape, graph.nodes[value.node].dtype)
                stored = text.say(f"tensor.from_elements {self._numbers[value.node]} : {kind}")
            self.tensors.store(stored, i, part)

    def _part(self, access: Access) -> Part:
        """Return which part of a tensor is loaded or stored at a time."""
        columns = self.text.graph.columns
        size = "%columns" if columns is None else columns
        return {
            Access.LINE: Part(("%row", 0), (1, size), (columns,)),
            Access.ROW: Part(("%row",), (1,), (1,)),
            Access.COLUMN: Part((0,), (size,), (columns,)),
        }.get(access, Part())

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
        work = Pass(text, level, dict(self._kept), self._under, self._loaded, self._vectors)
        for place in work.needed():
            self._spread(place)
        state = work.begin()
        if self._whole != 0:
            state = self._loop(work, state, "%zero to %blocks step %block", self._block)
        if graph.columns is None:
            state = self._loop(work, state, "%blocks to %columns step %lanes", self._rest)
        else:
            state = self._end(work, state)
        for r, (place, node) in enumerate(work.reductions.items()):
            self._numbers[place] = self._total(node, state[r * AT_ONCE : (r + 1) * AT_ONCE])
        self._kept.update(zip(work.stored, state[len(work.reductions) * AT_ONCE :], strict=True))
        for above, below in self._under.items():
            if below in work.stored:
                self._kept[above] = self._kept[below]

    def _loop(self, work: Pass, state: Sequence[str], bounds: str, step: _Steps) -> list[str]:
        """Write a part of a pass as a loop; return what it leaves."""
        text, kinds = self.text, ", ".join(work.kinds())
        name, counter = text.new("p"), text.new("at")
        inner = [text.new("s") for _ in state]
        pairs = ", ".join(f"{a} = {b}" for a, b in zip(inner, state, strict=True))
        text.lines.append(
            f"{name}:{len(state)} = scf.for {counter} = {bounds} iter_args({pairs}) -> ({kinds}) {{"
        )
        left = step(work, inner, counter)
        text.lines.append(f"scf.yield {', '.join(left)} : {kinds}\n}}")
        return [f"{name}#{i}" for i in range(len(state))]

    def _block(self, work: Pass, state: list[str], begin: str) -> list[str]:
        """Write what is done to several whole vectors."""
        text = self.text
        for slot in range(AT_ONCE):
            at = text.say(f"affine.apply affine_map<(d0) -> (d0 + {slot * text.lanes})>({begin})")
            state = work.step(Step(at, None, slot, {}), state)
        return state

    def _rest(self, work: Pass, state: list[str], begin: str) -> list[str]:
        """Write what is done to a vector that may end beyond its row."""
        text = self.text
        left = text.say(f"arith.subi %columns, {begin} : index")
        mask = text.say(f"vector.create_mask {left} : {text.vector('i1')}")
        return work.step(Step(begin, mask, 0, {}), state)

    def _end(self, work: Pass, state: list[str]) -> list[str]:
        """Write what is done to the vectors that no loop takes, in a row of known length."""
        text, columns, whole = self.text, self.text.graph.columns, self._whole
        assert columns is not None
        assert whole is not None
        for i, place in enumerate(range(whole, columns, text.lanes)):
            at, valid = text.say(f"arith.constant {place} : index"), columns - place
            bits = ", ".join("true" if lane < valid else "false" for lane in range(text.lanes))
            mask = text.vector_of(f"[{bits}]", "i1") if valid < text.lanes else None
            values = self._held.setdefault(place, {}) if self._is_short else {}
            state = work.step(Step(at, mask, i % AT_ONCE, values), state)
        return state

    def _spread(self, place: int) -> None:
        """Have all lanes hold a number of the row."""
        if place in self._vectors:
            return
        node, text = self.text.graph.nodes[place], self.text
        if isinstance(node, Constant):
            self._vectors[place] = text.vector_of(node.number, node.dtype)
        else:
            self._vectors[place] = text.spread(self._numbers[place], node.dtype)

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

"""A device program that computes rows: whether one can be, and how it is put into a module."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from lowering.stages.flow.rows.graph import RowGraph, Source, Value
from lowering.stages.flow.rows.write import arguments_of, kind_of, rows_of_item, write
from lowering.stages.ir.device_programs import (
    functions_of,
    put_program,
    set_workgroups,
    tell_flops,
)
from lowering.stages.ir.dispatch_work import flops, walk
from lowering.stages.ir.templates import put
from lowering.stages.linalg.separate_scalars import MOST_BINDINGS

_MOST_NODES = 200  # of a program: it is written again for each of several vectors
_PIPELINE = """attributes {translation_info = #iree_codegen.translation_info<
    pipeline = #iree_cpu.pipeline<Default>>}"""


@dataclass(frozen=True)
class RowProgram:
    """What is loaded, computed, and stored.

    Attributes:
        graph: what is computed.
        sources: the tensors that are loaded, in the order of the graph's arguments.
        outputs: what the tensors hold that are stored.
    """

    graph: RowGraph
    sources: tuple[Source, ...]
    outputs: tuple[Value, ...]

    def key(self) -> Hashable:
        """Return what two programs that do the same have in common."""
        graph = self.graph
        return graph.rows, graph.columns, tuple(graph.nodes), self.sources, self.outputs

    def can_run(self, lanes: int) -> bool:
        """Say whether it is small enough, of rows that are long enough.

        Args:
            lanes: numbers of a vector.
        """
        graph, count = self.graph, len(self.sources) + len(self.outputs)
        is_small = count <= MOST_BINDINGS and len(graph.nodes) <= _MOST_NODES
        return is_small and graph.rows > 0 and graph.columns * 2 >= lanes

    def taken(self) -> list[Any]:
        """Return the types of what it loads."""
        return self._types(self.sources)

    def made(self) -> list[Any]:
        """Return the types of what it stores."""
        return self._types([self.graph.source_of(value) for value in self.outputs])

    def _types(self, sources: Sequence[Source]) -> list[Any]:
        from iree.compiler import ir

        return [ir.Type.parse(kind_of(self.graph, source)) for source in sources]

    def put(self, name: str, functions: Sequence[Any], lanes: int) -> Any:
        """Put it at the insertion point; return the executable.

        Args:
            name: of the executable.
            functions: of the programs that it stands for: they say whence it comes, and how much
                work it is.
            lanes: numbers of a vector.
        """
        from iree.compiler import ir

        graph = self.graph
        arguments = arguments_of(graph, self.sources, self.outputs)
        entry = f"{name}_{graph.rows}x{graph.columns}"
        executable = put_program(name, entry, arguments, _PIPELINE)
        (function,) = functions_of(executable)
        (block,) = function.regions[0].blocks
        (end,) = block.operations
        ops = [list(walk(old)) for old in functions]
        places = [op.location for of_one in ops for op in of_one]
        with ir.InsertionPoint(end), ir.Location.fused(places):
            put(write(graph, self.sources, self.outputs, lanes), list(block.arguments))
        tell_flops(function, sum(flops(of_one) or 0 for of_one in ops))
        set_workgroups(executable, [-(-graph.rows // rows_of_item(graph)), 1, 1])
        return executable

"""A device program that computes rows: whether one can be, and how it is put into a module."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowering.abi import MOST_TENSORS
from lowering.stages.flow.rows.graph import RowGraph, Source, Value
from lowering.stages.flow.rows.multiply import can_multiply, count_blocks, write_product
from lowering.stages.flow.rows.signature import arguments_of, kind_of, write_counts
from lowering.stages.flow.rows.write import write
from lowering.stages.ir.device_programs import (
    Sized,
    compute_workgroups,
    functions_of,
    put_program,
    tell_flops,
)
from lowering.stages.ir.dispatch_work import flops
from lowering.stages.ir.symbols import walk
from lowering.stages.ir.templates import put

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

    @property
    def kind(self) -> str:
        """What its functions are called: prefetches go to products (`stages.code.read_ahead`)."""
        return "matmul" if self.graph.products() else "rows"

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
        is_small = count <= MOST_TENSORS and len(graph.nodes) <= _MOST_NODES
        if graph.products():
            return is_small and can_multiply(graph, self.outputs)
        are_long = graph.columns is None or graph.columns * 2 >= lanes
        return is_small and graph.rows != 0 and are_long

    def taken(self, sizes: Mapping[str, Any]) -> list[Sized]:
        """Return the types of what it loads.

        Args:
            sizes: the dimensions that are not known -> values.
        """
        return self._types(self.sources, sizes)

    def made(self, sizes: Mapping[str, Any]) -> list[Sized]:
        """Return the types of what it stores."""
        return self._types([self.graph.source_of(value) for value in self.outputs], sizes)

    def _types(self, sources: Sequence[Source], sizes: Mapping[str, Any]) -> list[Sized]:
        from iree.compiler import ir

        return [
            (
                ir.Type.parse(kind_of(self.graph, source)),
                [sizes[name] for name in self.graph.unknown(source)],
            )
            for source in sources
        ]

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
        if graph.products():
            text = write_product(graph, self.sources, self.outputs)
            work_items = count_blocks(graph)
        else:
            text = write(graph, self.sources, self.outputs, lanes)
            work_items = write_counts(graph)
        arguments = arguments_of(graph, self.sources, self.outputs)
        sizes = (size if size is not None else "D" for _, size in graph.dimensions)
        entry = f"{name}_{'x'.join(map(str, sizes))}"
        executable = put_program(name, entry, arguments, _PIPELINE, unknown=len(graph.unknown()))
        (function,) = functions_of(executable)
        (block,) = function.regions[0].blocks
        (end,) = block.operations
        ops = [list(walk(old)) for old in functions]
        places = [op.location for of_one in ops for op in of_one]
        with ir.InsertionPoint(end), ir.Location.fused(places):
            put(text, list(block.arguments))
        counts = [count for count in map(flops, ops) if count is not None]
        if len(counts) == len(ops):
            tell_flops(function, sum(counts))
        compute_workgroups(executable, work_items)
        return executable

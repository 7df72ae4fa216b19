"""What a device program of rows takes and stores, and how many work items it is."""

from __future__ import annotations

from collections.abc import Sequence

from lowering.stages.flow.rows.graph import Access, RowGraph, Source, Value
from lowering.stages.ir.types import tensor

_ITEM = 4096  # numbers of a work item, if a row has fewer
_COUNTS = """
func.func @counts({arguments}) -> (index, index, index) {{
{sizes}
  %items = arith.ceildivui %rows, %some : index
  return %items, %one, %one : index, index, index
}}
"""


def write_sizes(graph: RowGraph) -> str:
    """Write the sizes that are known, and how many rows a work item computes: some."""
    lines = [
        "%zero = arith.constant 0 : index",
        "%one = arith.constant 1 : index",
        f"%most = arith.constant {_ITEM} : index",
    ]
    for name, size in graph.dimensions:
        if size is not None:
            lines.append(f"%{name} = arith.constant {size} : index")
    if graph.columns is None:
        lines += [
            "%divisor = arith.maxui %columns, %one : index",
            "%quotient = arith.divui %most, %divisor : index",
            "%some = arith.maxui %quotient, %one : index",
        ]
    else:
        some = max(1, _ITEM // max(1, graph.columns))
        lines.append(f"%some = arith.constant {some} : index")
    return "\n".join(lines)


def write_counts(graph: RowGraph) -> str:
    """Write a function that takes what sizes are not known, and says how many work items to run."""
    arguments = ", ".join(f"%{name}: index" for name in graph.unknown())
    return _COUNTS.format(arguments=arguments, sizes=write_sizes(graph))


def arguments_of(graph: RowGraph, sources: Sequence[Source], outputs: Sequence[Value]) -> str:
    """Write the arguments of the function: sizes that are not known, and tensors."""
    tensors = tensors_of(graph, sources, outputs)
    types = [argument_type(graph, access, source) for access, source in tensors]
    sizes = [f"%{name}: index" for name in graph.unknown()]
    return ", ".join([*sizes, *(f"%a{i}: {kind}" for i, kind in enumerate(types))])


def tensors_of(
    graph: RowGraph, sources: Sequence[Source], outputs: Sequence[Value]
) -> list[tuple[str, Source]]:
    """Return what it loads and stores: the access to each, and what it is."""
    read = [("readonly", source) for source in sources]
    return [*read, *(("writeonly", graph.source_of(value)) for value in outputs)]


def kind_of(graph: RowGraph, source: Source) -> str:
    """Write the type of a tensor that has some of the dimensions of a graph."""
    if source.access is Access.NUMBER:
        return source.dtype
    return tensor([size for _, size in graph.sizes_of(source)], source.dtype)


def argument_type(graph: RowGraph, access: str, source: Source) -> str:
    """Write the type of an argument, from the access to it."""
    kind = kind_of(graph, source)
    is_number = source.access is Access.NUMBER
    return kind if is_number else f"!iree_tensor_ext.dispatch.tensor<{access}:{kind}>"

"""Put what is written as text into a module, in place of an op."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from lowering.stages.ir.symbols import symbol_of, walk


def replace_by(op: Any, text: str, arguments: Sequence[Any]) -> Any:
    """Replace an op of one result by the body of a function; return the new result.

    Args:
        op: goes away.
        text: see `put`.
        arguments: what the function is called with.
    """
    from iree.compiler import ir

    with ir.InsertionPoint(op), op.operation.location:
        (value,) = put(text, arguments)
    op.operation.results[0].replace_all_uses_with(value)
    op.operation.erase()
    return value


def put(text: str, arguments: Sequence[Any]) -> list[Any]:
    """Put the body of a function at the insertion point; return what it returns.

    Args:
        text: of a module, the last function of which has one block.
        arguments: what it is called with.
    """
    from iree.compiler import ir

    module = ir.Module.parse(text)  # its ops live as long
    (*_, function) = module.body.operations
    return copied(function.regions[0].blocks[0], arguments, ir.Location.current)


def copied(block: Any, arguments: Sequence[Any], location: Any = None) -> list[Any]:
    """Write the ops of a block again, at the insertion point.

    Args:
        block: ends with a return or a yield.
        arguments: in the place of its own; fewer, if the others are not used.
        location: of the copies, if not that of what they are copied from.

    Returns:
        What it returns or yields.
    """
    *ops, last = block.operations
    values = clones(ops, dict(zip(block.arguments, arguments, strict=False)), location)
    return [values.get(operand, operand) for operand in last.operands]


def clones(ops: Iterable[Any], values: Mapping[Any, Any], location: Any = None) -> dict[Any, Any]:
    """Write ops again, at the insertion point, in order.

    Args:
        ops: what to write.
        values: value -> what the copies have in its place.
        location: of the copies, if not that of what they are copied from.

    Returns:
        `values`, and the results of the copies in the place of those of the ops.
    """
    values = dict(values)
    for op in ops:
        copy = op.operation.clone()
        if location is not None:
            copy.location = location
        for inner in walk(copy):
            for i, operand in enumerate(inner.operands):
                if operand in values:
                    inner.operands[i] = values[operand]
        values.update(zip(op.operation.results, copy.results, strict=True))
    return values


def put_functions(module: Any, text: str, there: Collection[str] = ()) -> None:
    """Append the functions of a module to another.

    Args:
        module: gets them.
        text: of a module.
        there: names of what the text declares and the module has.
    """
    from iree.compiler import ir

    source = ir.Module.parse(text)
    with ir.InsertionPoint(module.operation.regions[0].blocks[0]):
        for op in source.body.operations:
            if symbol_of(op) not in there:
                op.operation.clone()


def compilation_info(
    tiles: Mapping[str, Sequence[int]],
    pipeline: str = "DoubleTilingExpert",
    *,
    peels: bool = False,
) -> str:
    """Write how IREE is to make code of an op.

    Args:
        tiles: level, such as `distribution` (to work items) -> size of a tile in each loop of the
            op; 0: that loop is not tiled there.
        pipeline: which of IREE's.
        peels: whether what a loop has left over by its tiles gets a loop of its own.
    """
    sizes = ", ".join(f"{level} = {list(of)}" for level, of in tiles.items())
    peeling = ", {enable_loop_peeling = true}" if peels else ""
    return (
        "#iree_codegen.compilation_info<"
        f"lowering_config = #iree_cpu.lowering_config<{sizes}>, "
        "translation_info = #iree_codegen.translation_info<"
        f"pipeline = #iree_cpu.pipeline<{pipeline}>{peeling}>>"
    )


def tiles_of_product(rows: int, columns: int) -> str:
    """Write how a product within a work item is computed: so many rows and columns at a time."""
    tiles = {
        "distribution": [0, 0, 0],
        "vector_common_parallel": [rows, columns, 0],
        "vector_reduction": [0, 0, 1],
    }
    return compilation_info(tiles, peels=True)

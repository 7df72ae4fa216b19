"""Rewrites of linalg IR without which IREE computes something else than the program says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

# Ops whose result is (part of) the memory of their first operand.
_VIEWS = frozenset(
    {"tensor.cast", "tensor.collapse_shape", "tensor.expand_shape", "tensor.extract_slice"}
)
_ELEMENTWISE = frozenset(
    f"linalg.{n}" for n in ("broadcast", "copy", "elementwise", "fill", "map", "transpose")
)
# Reduction -> how it is read: views and indexing maps on the way.
_Reads: TypeAlias = dict[Any, tuple[str, ...]]
_READS = frozenset({"tensor.concat", "tensor.dim", "tensor.extract", "tensor.pad", "func.return"})


def keep_arguments(function: Any) -> None:
    """Return arguments that an op would overwrite, so that IREE copies them first.

    IREE takes an imported buffer that is not read any more for scratch, although the caller has
    not given it away (`iree.abi.consume` is not set): sorting a tensor would sort the user's own.
    What is returned is read until the end. The runtime ignores the added results.

    Before: func.func @main(%arg0) { %0 = tm_tensor.sort outs(%arg0); return %0 }
    After:  func.func @main(%arg0) { %0 = tm_tensor.sort outs(%arg0); return %0, %arg0 }
    """
    from iree.compiler import ir

    block = function.regions[0].blocks[0]
    kept = [argument for argument in block.arguments if _is_overwritten(argument)]
    if not kept:
        return
    end = block.operations[len(block.operations) - 1]
    with ir.InsertionPoint(end):
        ir.Operation.create("func.return", operands=[*end.operands, *kept])
    end.operation.erase()
    kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    results = [*kind.results, *(argument.type for argument in kept)]
    function.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(kind.inputs, results)
    )
    if "res_attrs" in function.attributes:
        del function.attributes["res_attrs"]


def separate_reads(function: Any) -> None:
    """Keep a reduction out of the dispatch of an element-wise op that reads it in two ways.

    IREE fuses the two although no one loop serves both reads: `s[:, None] - s[None]` with
    `s = x.sum(1)` would be zeros, and `p - p.mT` with `p = softmax(...)` is wrong, too.

    Before: %s = linalg.generic {reduction}; %a = expand_shape %s; %b = expand_shape %s
            %0 = linalg.generic {(d0, 0), (0, d1)} ins(%a, %b)
    After:  the same with %c = util.optimization_barrier %b, and ins(%a, %c)
    """
    from iree.compiler import ir

    reads: dict[Any, _Reads] = {}
    for op in list(function.regions[0].blocks[0].operations):
        if op.operation.name in _VIEWS:
            reads[op.results[0]] = _through(reads.get(op.operands[0], {}), str(op.results[0].type))
        elif op.operation.name == "linalg.transpose":
            permutation = str(op.attributes["permutation"])
            reads[op.results[0]] = _through(reads.get(op.operands[0], {}), permutation)
        elif op.operation.name == "linalg.generic" and not _reduces(op):
            found: _Reads = {}
            for i, (operand, access) in enumerate(_accesses(op)):
                read = _through(reads.get(operand, {}), access)
                if any(found.get(root, ways) != ways for root, ways in read.items()):
                    with ir.InsertionPoint(op):
                        op.operation.operands[i] = _behind_barrier(operand)
                else:
                    found.update(read)
            reads |= dict.fromkeys(op.results, found)
        elif _is_linalg(op) and _reduces(op):
            reads |= {result: {op.operation: ()} for result in op.results}


def _behind_barrier(value: Any) -> Any:
    """Give the value again, behind a barrier that stands before its views (IREE asks for that)."""
    from iree.compiler import ir

    if isinstance(value.owner, ir.Block) or value.owner.operation.name not in _VIEWS:
        return ir.Operation.create(
            "util.optimization_barrier", results=[value.type], operands=[value]
        ).result
    source = _behind_barrier(value.owner.operands[0])
    view = value.owner.operation.clone()
    view.operands[0] = source
    return view.results[0]


def _through(reads: _Reads, access: str) -> _Reads:
    return {root: (*way, access) if access else way for root, way in reads.items()}


def _is_overwritten(value: Any) -> bool:
    for use in value.uses:
        op, index = use.owner, use.operand_number
        name = op.operation.name
        if name in _VIEWS and index == 0:
            if any(_is_overwritten(result) for result in op.results):
                return True
        elif not (name in _READS or _only_reads(op, index)):
            return True
    return False


def _only_reads(op: Any, index: int) -> bool:
    """Say whether an op does no more than read its operand `index`."""
    name = op.operation.name
    if name == "tensor.insert_slice":
        return index != 1  # the tensor that is inserted into
    return name.startswith(("linalg.", "tm_tensor.")) and index < _input_count(op)


def _input_count(op: Any) -> int:
    return len(op.operands) - len(op.results)  # each result has the operand that it starts from


def _accesses(op: Any) -> Iterator[tuple[Any, str]]:
    """Give the inputs of an element-wise op, and how each is read; empty: as it is."""
    maps = list(op.attributes["indexing_maps"])
    for operand, access in zip(list(op.operands)[: _input_count(op)], maps, strict=False):
        yield operand, "" if access == maps[-1] else f"{access}"


def _is_linalg(op: Any) -> bool:
    return hasattr(op, "operation") and op.operation.name.startswith("linalg.")


def _reduces(op: Any) -> bool:
    if op.operation.name == "linalg.generic":
        return "reduction" in str(op.attributes["iterator_types"])
    return op.operation.name not in _ELEMENTWISE

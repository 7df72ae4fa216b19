"""Have rows sorted by merging, and only what is read of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from lowering.digest import text_digest
from lowering.stages.code.branches import branch, go_on_elsewhere
from lowering.stages.code.bubble_loops import Bubble, bubbles_in
from lowering.stages.code.sort_functions import compare, ordered_function, sort_function
from lowering.stages.flow.read_first import first_of
from lowering.stages.ir.symbols import constant_of, inside, maker_of, symbol_of, variants
from lowering.stages.ir.templates import clones, put, put_functions

_NAME = "npu_iree.sort"
_ROOM_BYTES = 1 << 15  # on the stack, of which IREE itself takes no more than twice as much
_ENDLESS = (1 << 63) - 1
_MOST_FIRST = 32  # of more, merging is the faster if those that come first are the last
# What a comparison is made of.
_PURE = frozenset(
    {
        *("llvm.and", "llvm.bitcast", "llvm.fcmp", "llvm.fpext", "llvm.fptrunc", "llvm.icmp"),
        *("llvm.mlir.constant", "llvm.or", "llvm.shl", "llvm.xor", "llvm.zext"),
    }
)


def sort_rows(module: Any) -> None:
    """Merge runs of a row where IREE exchanges neighbours, as often as there are elements.

    64 rows of 1000 floats take 1.4 ms for 36 (two cores of an EPYC, Zen 3; eager: 1.8). Where only
    the first of a row are read (`lowering.stages.flow.read_first`), no others are kept in order:
    the first 8 of 1024 rows of 256 floats, and their places, take 1.3 ms for the 4.8 of merging.

    Equal elements stay in their order, as they did, and so do NaNs. Rows that are longer than there
    is room for on the stack are sorted as before.

    Before: for i in 0..n: for each row: for j in 0..n - 1: exchange %x[j] and %x[j + 1], if ...
    After:  for i in 0..n: for each row: if n > room: as before
                                         else if i == 0: sort(&%x[0], &%x[1] - &%x[0], n)

    Args:
        module: as IREE's phase `executable-targets` leaves it, in the LLVM dialect.
    """
    from iree.compiler import ir

    modules = [inner for variant in variants(module) for inner in inside(variant, "builtin.module")]
    with ir.Location.unknown():
        for inner in modules:
            for function in inside(inner, "llvm.func"):
                for bubble in list(bubbles_in(function)):
                    _merge(inner, bubble, first_of(function))


def _merge(module: Any, bubble: Bubble, first: int | None) -> None:
    """Have a function sort, if it has room: only the first elements, if few are read.

    It is named by what it does: IREE links all device code, and of functions of one name it takes
    one.
    """
    from iree.compiler import ir

    kinds, count = [str(kind) for kind in bubble.kinds], constant_of(bubble.count)
    room = _ROOM_BYTES // (2 * sum(-(-kind.width // 8) for kind in bubble.kinds))
    if first is not None and first > _MOST_FIRST:
        first = None
    if first is None and count is not None and count > room:
        return
    comparison = _put_comparison(module, kinds, bubble)
    if comparison is None:
        return
    room = min(room, count or room)
    name = f"{_NAME}." + text_digest(f"{comparison} {room} {first}")
    text = sort_function(name, kinds, room, first)
    if any(symbol_of(function) == name for function in inside(module, "llvm.func")):
        comparison.operation.erase()
    else:
        comparison.attributes["sym_name"] = ir.StringAttr.get(ordered_function(name))
        put_functions(module, text, {ordered_function(name)})
    _enter(name, bubble, room if first is None else _ENDLESS)


def _put_comparison(module: Any, kinds: Sequence[str], bubble: Bubble) -> Any:
    """Append the function that compares two elements; return it, or None if it is not known."""
    from iree.compiler import ir

    if isinstance(bubble.ordered, str):
        put_functions(module, compare(_NAME, kinds, bubble.ordered))
        return inside(module, "llvm.func")[-1]
    ops = _makers_of([bubble.ordered], bubble.loaded, maker_of)
    read = [operand for op in ops for operand in op.operands]
    is_known = all(maker_of(operand) for operand in read)
    if not is_known or not all(op.name in _PURE for op in ops):
        return None
    put_functions(module, compare(_NAME, kinds))
    function = inside(module, "llvm.func")[-1]
    (block,) = function.regions[0].blocks
    (*_, end) = block.operations
    with ir.InsertionPoint(end):
        values = clones(ops, dict(zip(bubble.loaded, block.arguments, strict=True)))
    end.operation.operands[0] = values[bubble.ordered]
    return function


def _makers_of(
    values: Sequence[Any], given: Collection[Any], is_made: Callable[[Any], Any]
) -> list[Any]:
    """Return the ops that compute values, in order, but for those of values that are given."""
    found = dict[Any, None]()

    def visit(value: Any) -> None:
        if value in given or value in found or not is_made(value):
            return
        for operand in value.owner.operands:
            visit(operand)
        found[value] = None

    for value in values:
        visit(value)
    return [value.owner for value in found]


def _enter(name: str, bubble: Bubble, most: int) -> None:
    """Have the first round call a function that does all, and the others do nothing.

    Args:
        name: of the function.
        bubble: the loops.
        most: how many elements it sorts.
    """
    from iree.compiler import ir

    pointers = [one.operands[0] for one, _ in bubble.pairs]
    ops = _makers_of(pointers, [bubble.place], bubble.is_inside)
    attempt, others = go_on_elsewhere(bubble.around)
    decide, call = (others.create_before() for _ in range(2))
    with ir.InsertionPoint(attempt):
        fits, is_first = put(_ASK.format(most=most), [bubble.count, bubble.round])
        branch(fits, decide, others)
    with ir.InsertionPoint(decide):
        branch(is_first, call, bubble.behind)
    with ir.InsertionPoint(call):
        there = list[Any]()
        for place in put(_PLACES, []):
            copies = clones(ops, {bubble.place: place})
            there += [copies.get(pointer, pointer) for pointer in pointers]
        put(_call(name, len(pointers)), [*there, bubble.count])
        ir.Operation.create("llvm.br", successors=[bubble.behind])


_ASK = """
func.func @ask(%n: i64, %round: i64) -> (i1, i1) {{
  %most = llvm.mlir.constant({most} : i64) : i64
  %zero = llvm.mlir.constant(0 : i64) : i64
  %fits = llvm.icmp "sle" %n, %most : i64
  %is_first = llvm.icmp "eq" %round, %zero : i64
  return %fits, %is_first : i1, i1
}}
"""
_PLACES = """
func.func @places() -> (i64, i64) {
  %zero = llvm.mlir.constant(0 : i64) : i64
  %one = llvm.mlir.constant(1 : i64) : i64
  return %zero, %one : i64, i64
}
"""


def _call(name: str, tensors: int) -> str:
    types = f"({', '.join(['!llvm.ptr, i64'] * tensors)}, i64)"
    lines = [
        f"""
  %at{k} = llvm.ptrtoint %row{k} : !llvm.ptr to i64
  %next{k} = llvm.ptrtoint %then{k} : !llvm.ptr to i64
  %step{k} = llvm.sub %next{k}, %at{k} : i64"""
        for k in range(tensors)
    ]
    takes = ", ".join(f"%{of}{k}: !llvm.ptr" for of in ("row", "then") for k in range(tensors))
    given = ", ".join(f"%row{k}, %step{k}" for k in range(tensors))
    return f"""
llvm.func @{name}{types}
func.func @call({takes}, %n: i64) {{{"".join(lines)}
  llvm.call @{name}({given}, %n) : {types} -> ()
  return
}}
"""

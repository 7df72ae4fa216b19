"""The loops that sort rows by exchanging neighbours, in the LLVM dialect: found and read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lowering.stages.code.branches import is_next, successors
from lowering.stages.ir.symbols import constant_of, maker_of

_BRANCH, _CHOICE = "llvm.br", "llvm.cond_br"
_EFFECTS = ("llvm.call", "llvm.inline_asm", "llvm.load", "llvm.store")
# What is kept of two integers, the first of them first -> how these compare if they may stay.
_EXTREMES = {"llvm.intr.smin": "sle", "llvm.intr.smax": "sge"}


@dataclass(frozen=True)
class _Loop:
    """A loop.

    Attributes:
        header: its block of one argument, which counts.
        counter: that argument.
        bound: how often.
        body, behind: the blocks that the header goes on to, and leaves to.
    """

    header: Any
    counter: Any
    bound: Any
    body: Any
    behind: Any


@dataclass(frozen=True)
class Bubble:
    """A loop over a row which compares an element with the next; and those around it.

    Attributes:
        around: the header of the loop around it.
        behind: the block after it, which ends that loop's step.
        round: the counter of the rounds, in each of which all neighbours are compared.
        count: how many elements there are.
        place: which of them is compared with the next.
        pairs: the loads of it and of the next, of each of the tensors.
        ordered: whether the two may stay as they are, as a value; or how integers compare then.
        blocks: those in which it is computed.
    """

    around: Any
    behind: Any
    round: Any
    count: Any
    place: Any
    pairs: Sequence[tuple[Any, Any]]
    ordered: Any
    blocks: Sequence[Any]

    @property
    def kinds(self) -> list[Any]:
        """The types of the elements."""
        return [one.result.type for one, _ in self.pairs]

    @property
    def loaded(self) -> list[Any]:
        """An element and the next, of each of the tensors."""
        return [load.result for pair in self.pairs for load in pair]

    def is_inside(self, value: Any) -> bool:
        """Say whether a value is computed anew for each row."""
        return bool(maker_of(value)) and value.owner.operation.block in self.blocks


def bubbles_in(function: Any) -> Iterator[Bubble]:
    """Return the loops of a function that sort."""
    for block in function.regions[0].blocks:
        if (bubble := _bubble_at(block)) is not None:
            yield bubble


def _bubble_at(header: Any) -> Bubble | None:
    """Return what sorts by a loop; None if that loop does something else."""
    loop = _loop_at(header)
    around = _around(loop) if loop is not None else None
    if loop is None or around is None or loop.behind.arguments:
        return None
    (*ops, back) = loop.body.operations
    if not _goes_to(back, header) or not is_next(back.operands[0], loop.counter):
        return None
    pairs, ordered = _exchanged(ops)
    rounds = _rounds(around, loop.bound)
    if ordered is None or rounds is None or _has_effects([*ops, *around.body.operations], pairs):
        return None
    blocks = [block for block in (header, loop.body, around.body) if block != around.header]
    return Bubble(
        around=around.header,
        behind=loop.behind,
        round=rounds.counter,
        count=rounds.bound,
        place=loop.counter,
        pairs=pairs,
        ordered=ordered,
        blocks=blocks,
    )


def _loop_at(header: Any) -> _Loop | None:
    (*_, end) = header.operations
    if len(header.arguments) != 1 or end.operation.name != _CHOICE:
        return None
    (counter,), test = header.arguments, end.operands[0]
    if maker_of(test) != "llvm.icmp" or test.owner.operands[0] != counter:
        return None
    return _Loop(header, counter, test.owner.operands[1], *successors(end))


def _around(loop: _Loop) -> _Loop | None:
    """Return the loop of which each step ends where another loop does."""
    (*_, again) = loop.behind.operations
    if again.operation.name != _BRANCH or len(again.operands) != 1:
        return None
    (header,) = successors(again)
    around = _loop_at(header)
    is_step = around is not None and is_next(again.operands[0], around.counter)
    return around if is_step and len(list(loop.behind.operations)) == 2 else None


def _rounds(loop: _Loop | None, last: Any) -> _Loop | None:
    """Return the loop, of this and those around it, that only counts, one more than others do."""
    while loop is not None:
        users = [use.owner.operation.name for use in loop.counter.uses]
        if sorted(users) == ["llvm.add", "llvm.icmp"]:
            return loop if _is_one_less(last, loop.bound) else None
        loop = _around(loop)
    return None


def _goes_to(op: Any, block: Any) -> bool:
    return bool(op.operation.name == _BRANCH and op.operation.successors[0] == block)


def _is_one_less(last: Any, count: Any) -> bool:
    if (number := constant_of(count)) is not None:
        return constant_of(last) == number - 1
    is_difference = maker_of(last) == "llvm.sub" and last.owner.operands[0] == count
    return is_difference and constant_of(last.owner.operands[1]) == 1


def _exchanged(ops: Sequence[Any]) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the pairs that are loaded, and when they are stored as they were."""
    loads = [op.operation for op in ops if op.operation.name == "llvm.load"]
    stores = [op.operation for op in ops if op.operation.name == "llvm.store"]
    stored = {op.operands[1]: op.operands[0] for op in stores}
    pairs = list(zip(loads[::2], loads[1::2], strict=False))
    kept = [_kept(pair, *(stored.get(load.operands[0]) for load in pair)) for pair in pairs]
    conditions = {when for when in kept if not isinstance(when, str)} or set(kept)
    is_all = len(loads) == len(stores) == len(stored) == 2 * len(pairs)
    if not is_all or len(conditions) != 1:
        return [], None
    (ordered,) = conditions
    extremes = [pair for pair, when in zip(pairs, kept, strict=True) if isinstance(when, str)]
    is_one = len(pairs) == 1 or all(_compares(ordered, pair) for pair in extremes)
    return (pairs, ordered) if is_one else ([], None)


def _kept(pair: tuple[Any, Any], first: Any, second: Any) -> Any:
    """Return when a pair is stored as it was; None: something else is stored."""
    if first is None or second is None:
        return None
    one, other = (load.result for load in pair)
    names = [maker_of(first), maker_of(second)]
    operands = [list(value.owner.operands) for value in (first, second) if maker_of(value)]
    if names == ["llvm.select"] * 2:
        condition = operands[0][0]
        is_exchange = operands == [[condition, one, other], [condition, other, one]]
        return condition if is_exchange else None
    is_extreme = sorted(names) == sorted(_EXTREMES) and operands == [[one, other]] * 2
    return _EXTREMES[names[0]] if is_extreme else None


def _compares(ordered: Any, pair: tuple[Any, Any]) -> bool:
    """Say whether a value compares a pair, as what takes its extremes does."""
    values = [load.result for load in pair]
    is_comparison = not isinstance(ordered, str) and maker_of(ordered) == "llvm.icmp"
    return is_comparison and list(ordered.owner.operands) == values


def _has_effects(ops: Sequence[Any], pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Say whether ops do something beside loading pairs, and storing as many numbers."""
    names = [op.operation.name for op in ops if op.operation.name.startswith(_EFFECTS)]
    return set(names) != {"llvm.load", "llvm.store"} or len(names) != 4 * len(pairs)

"""Join device programs that compute row by row: a row is read once, and stays in a cache."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from lowering.cpu import best_for
from lowering.stages.flow.rows.graph import Load, RowGraph, Source, Value
from lowering.stages.flow.rows.program import RowProgram
from lowering.stages.flow.rows.read import Shape, read, shape_of_rows
from lowering.stages.ir.device_programs import (
    DISPATCH,
    EXECUTABLE,
    RESHAPE,
    entry_of,
    functions_of,
    made_by,
    put_dispatch,
    reshaped,
    results_of,
    taken_by,
)
from lowering.stages.ir.sizes import product
from lowering.stages.ir.symbols import inside, origin_of, symbol_of, walk

_LANES = {frozenset({"avx512f"}): 16, frozenset[str](): 8}  # numbers of a vector
# Rows that keep all threads busy; of fewer, what computes number by number is joined if it is few.
_MANY_ROWS, _FEW_NUMBERS = 64, 1 << 16
_PLAIN = frozenset({"entry_points", "operandSegmentSizes", "tied_operands"})  # of a dispatch


def join_rows(module: Any, features: Collection[str]) -> None:
    """Write what is computed row by row as one device program, in vectors.

    IREE makes a program of each reduction, which reads the matrix again, reduces 16 numbers to one
    at each step, and takes rows of odd lengths number by number. Here a program takes one row after
    the other, and passes over it once for each reduction that needs the one before.

    Before: %m = dispatch max of %x; %e = dispatch exp(%x - %m); %s = dispatch sum of %e
    After:  %e, %s = dispatch: for each row: %m = max of %x; %e = exp(%x - %m), %s = sum of %e

    Args:
        module: one in flow, its dispatches formed.
        features: of the CPU that is compiled for, by LLVM's names.
    """
    lanes = best_for(features, _LANES)
    executables = {symbol_of(op): op for op in inside(module, EXECUTABLE)}
    written = dict[Hashable, Any]()
    for function in inside(module, "util.func"):
        for block in function.regions[0].blocks:
            for group in _groups(block, executables, lanes):
                group.join(written, lanes)
    dispatches = [op for op in walk(module) if op.name == DISPATCH]
    used = {str(e.value[0]) for op in dispatches for e in op.attributes["entry_points"]}
    for name, executable in executables.items():
        if name not in used:
            executable.operation.erase()


@dataclass(frozen=True)
class _Member:
    """A dispatch, the program that it runs, and its place among the ops of its block."""

    dispatch: Any
    executable: Any
    function: Any
    place: int

    @classmethod
    def of(cls, op: Any, place: int, executables: Mapping[str, Any]) -> _Member | None:
        """Take a dispatch of a program of one block, of tensors and their sizes."""
        if op.name != DISPATCH or len(made_by(op)) < len(op.results):
            return None
        if len(op.attributes["entry_points"]) != 1 or not _PLAIN.issuperset(op.attributes):
            return None
        executable = executables.get(entry_of(op))
        functions = functions_of(executable) if executable is not None else []
        blocks = [block for function in functions for block in function.regions[0].blocks]
        if (
            len(functions) != 1
            or len(blocks) != 1
            or len(blocks[0].arguments) != len(taken_by(op)) + len(op.results)
        ):
            return None
        return cls(op, executable, functions[0], place)

    @property
    def given(self) -> list[Any]:
        """What it takes: tensors, and sizes."""
        return [value for value, _ in taken_by(self.dispatch)]

    @property
    def roots(self) -> list[Any]:
        """What it takes, before it was reshaped."""
        return [origin_of(value, (RESHAPE,)) for value in self.given]

    @property
    def shape(self) -> Shape | None:
        """How many rows of how many numbers it reduces; None if it does not."""
        return shape_of_rows(self.function, self.given)


@dataclass(frozen=True, eq=False)
class _Group:
    """Dispatches that compute the same rows.

    Attributes:
        reading: what they compute.
        members: in the order of their block.
    """

    reading: _Reading
    members: tuple[_Member, ...] = ()

    @classmethod
    def of(cls, shape: Shape) -> _Group:
        """Begin with none."""
        rows, columns = shape
        return cls(_Reading(shape, RowGraph(rows.number, columns.number)))

    @property
    def shape(self) -> Shape:
        """How many rows, of how many numbers."""
        return self.reading.shape

    def makes_any(self, values: Collection[Any]) -> bool:
        """Say whether a member makes one of some values."""
        return any(value in self.reading.made for value in values)

    def with_members(self, members: Sequence[_Member], lanes: int) -> _Group | None:
        """Return the group with more members; None if these cannot be joined to it."""
        group = _Group(self.reading.copy(), (*self.members, *members))
        if not (group._has_many_rows() and group._can_run_last()):
            return None
        if not all(map(group.reading.take, members)):
            return None
        return group if group._program().can_run(lanes) else None

    def _has_many_rows(self) -> bool:
        """Say whether there may be rows for all threads, or numbers too few for that to matter."""
        rows, numbers = self.shape[0].number, product(self.shape).number
        is_many = rows is None or rows >= _MANY_ROWS
        is_few = numbers is not None and numbers <= _FEW_NUMBERS
        return is_many or is_few or all(member.shape for member in self.members)

    def _can_run_last(self) -> bool:
        """Say whether nothing before the last member needs what one of them makes."""
        last = self.members[-1].dispatch
        return all(
            user.block == last.block and last.is_before_in_block(user)
            for member in self.members
            for result in member.dispatch.results
            for user in self._others(result)
        )

    def _others(self, value: Any) -> Iterator[Any]:
        """Return what reads a value, as it is or reshaped, and is no member."""
        for use in value.uses:
            user = use.owner.operation
            if user.name == RESHAPE:
                yield from self._others(user.results[0])
            elif all(user != member.dispatch for member in self.members):
                yield user

    def _outputs(self) -> dict[Any, Value]:
        """Return the results of members that others read, and what they hold."""
        made = self.reading.made.items()
        return {value: held for value, held in made if any(self._others(value))}

    def _program(self) -> RowProgram:
        """Return what the members load, compute, and store for others."""
        sources = tuple(source for _, source in self.reading.sources)
        return RowProgram(self.reading.graph, sources, tuple(self._outputs().values()))

    def join(self, written: dict[Hashable, Any], lanes: int) -> None:
        """Replace the dispatches by one.

        Args:
            written: the programs that there are, by their keys; gets more.
            lanes: numbers of a vector.
        """
        from iree.compiler import ir

        program, last = self._program(), self.members[-1]
        key = program.key()
        if key not in written:
            name = f"{symbol_of(last.executable)}_{program.kind}"
            if name in map(symbol_of, written.values()):
                name = f"{name}_{len(written)}"
            with ir.InsertionPoint(self.members[0].executable):
                functions = [member.function for member in self.members]
                written[key] = program.put(name, functions, lanes)
        location = ir.Location.fused([member.dispatch.location for member in self.members])
        with ir.InsertionPoint(last.dispatch), location:
            dimensions = zip(program.graph.dimensions, self.shape, strict=True)
            sizes = {name: size.put() for (name, known), size in dimensions if known is None}
            places, taken = self.reading.sources.values(), program.taken(sizes)
            operands = [
                reshaped(taken_by(dispatch)[i], kind)
                for (dispatch, i), kind in zip(places, taken, strict=True)
            ]
            new = put_dispatch(written[key], operands, program.made(sizes), list(sizes.values()))
            results = dict(chain.from_iterable(results_of(m.dispatch) for m in self.members))
            for value, made in zip(self._outputs(), results_of(new), strict=True):
                whole, _ = reshaped(made, (value.type, results[value]))
                _move_reshapes(value, last.dispatch)
                value.replace_all_uses_with(whole)
        for member in reversed(self.members):
            for result in member.dispatch.results:
                _erase_reshapes(result)
            member.dispatch.erase()


@dataclass(frozen=True)
class _Reading:
    """What is read of the members of a group, one after the other.

    Attributes:
        shape: how many rows, of how many numbers.
        graph: what they compute.
        made: what their results hold.
        sources: what they load, and how -> the dispatch that takes it, as which operand.
    """

    shape: Shape
    graph: RowGraph
    made: dict[Any, Value] = field(default_factory=dict)
    sources: dict[tuple[Any, Source], tuple[Any, int]] = field(default_factory=dict)

    def copy(self) -> _Reading:
        """Return it, to read more."""
        return _Reading(self.shape, self.graph.copy(), dict(self.made), dict(self.sources))

    def take(self, member: _Member) -> bool:
        """Read a member; say whether it computes rows of the graph, and no more."""
        roots = member.roots
        load = partial(self._load, member.dispatch, roots)
        stored = read(member.function, member.given, self.shape, self.graph, load)
        results = dict(enumerate(member.dispatch.results, len(roots)))
        if stored is None or stored.keys() != results.keys():
            return False
        self.made.update({results[i]: held for i, held in stored.items()})
        return True

    def _load(
        self, dispatch: Any, roots: Sequence[Any], argument: int, source: Source
    ) -> int | None:
        root = roots[argument]
        if root in self.made:
            held = self.made[root]
            return held.node if held.access is source.access else None
        self.sources.setdefault((root, source), (dispatch, argument))
        return self.graph.add(Load(list(self.sources).index((root, source)), source))


def _groups(block: Any, executables: Mapping[str, Any], lanes: int) -> list[_Group]:
    """Find dispatches in a block that can be joined: a reduction, what it reads, what reads it."""
    found, alone = list[_Group](), dict[Any, _Member]()  # result -> what makes it, no reduction
    for place, op in enumerate(block.operations):
        member = _Member.of(op.operation, place, executables)
        if member is None or _add(member, found, lanes):
            continue
        shape = member.shape
        if shape is None:
            alone.update(dict.fromkeys(member.dispatch.results, member))
            continue
        roots = member.roots
        makers = {other.dispatch: other for value, other in alone.items() if value in roots}
        before = list(makers.values())
        empty = _Group.of(shape)
        group = empty.with_members([*before, member], lanes)
        if group is None and before:
            group = empty.with_members([member], lanes)
        if group is not None:
            found.append(group)
            for other in group.members:
                for value in other.dispatch.results:
                    alone.pop(value, None)
    return found


def _add(member: _Member, groups: list[_Group], lanes: int) -> bool:
    """Add a dispatch to a group that makes what it takes; several such groups become one.

    Returns:
        Whether it could be added, to all of them or to one.
    """
    roots = member.roots
    makers = [group for group in groups if group.makes_any(roots)]
    alternatives = [[group] for group in makers] if len(makers) > 1 else []
    for chosen in (makers, *alternatives):
        if len({group.shape for group in chosen}) != 1:
            continue
        if len(chosen) == 1:
            grown = chosen[0].with_members([member], lanes)
        else:
            members = [other for group in chosen for other in group.members]
            members.sort(key=lambda other: other.place)
            grown = _Group.of(chosen[0].shape).with_members([*members, member], lanes)
        if grown is not None:
            groups[:] = [*(group for group in groups if group not in chosen), grown]
            return True
    return False


def _move_reshapes(value: Any, before: Any) -> None:
    """Move the reshapes of a value that stand before an op right before it, in order."""
    for use in list(value.uses):
        user = use.owner.operation
        if user.name == RESHAPE:
            if user.block == before.block and user.is_before_in_block(before):
                user.move_before(before)
            _move_reshapes(user.results[0], before)


def _erase_reshapes(value: Any) -> None:
    """Erase the reshapes of a value that nothing reads."""
    for use in list(value.uses):
        user = use.owner.operation
        if user.name == RESHAPE:
            _erase_reshapes(user.results[0])
            user.erase()

"""What eager refuses for its values: a region goes around it, and tells whether it had to.

PyTorch's kernels raise an error for an index out of range, an integer division by zero, or where
`torch._assert_async` is told so. A device program can raise nothing: beyond a tensor is somebody
else's memory, or none, and the division ends the process. So the index is moved to the nearest that
there is, the divisor to 1, and the region gives one more result, which says whether any had to be.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import fx

from lowering.intervals import Interval, Intervals
from lowering.nodes import ASSERTIONS, draws_random_numbers, is_one_of, write_call
from lowering.op_names import op_name
from lowering.signature import Check
from lowering.sizes import has_elements
from lowering.source import user_line

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
# Their results have all elements of their argument, and no others.
_SAME_ELEMENTS = frozenset(
    f"aten.{name}" for name in ("clone", "expand", "permute", "squeeze", "unsqueeze", "view")
)
_MOST_COMPARED = 8  # nodes on the way back from an operand: further back, equal ones are two


@dataclass(frozen=True)
class _Index:
    """What a tensor of indices must be.

    Attributes:
        source: the tensor that they point into.
        dim: along which dimension.
        from_the_end: whether negative ones count from there.
    """

    source: fx.Node
    dim: int
    from_the_end: bool = False

    kind: ClassVar[Literal["index"]] = "index"

    @property
    def size(self) -> int | torch.SymInt:
        """How many places there are."""
        shape = self.source.meta["val"].shape
        return shape[self.dim] if shape else 1

    def is_kept(self, known: Interval | None) -> bool:
        """Say whether all values of an interval are right."""
        size = self.size
        if known is None or not isinstance(size, int):
            return False
        return (-size if self.from_the_end else 0) <= known[0] and known[1] < size

    def is_like(self, other: object) -> bool:
        """Say whether the same values are right for another."""
        if not isinstance(other, _Index) or self.from_the_end != other.from_the_end:
            return False
        return str(self.size) == str(other.size)

    def keep(self, writer: _Writer, origin: fx.Node, given: fx.Node) -> fx.Node:
        """Write values that are right, and the same where those given are."""
        low, high = writer.once(self, lambda: self._bounds(writer, origin))
        return writer.write(origin, given.meta["val"], aten.clamp.default, given, low, high)

    def is_wrong(self, writer: _Writer, origin: fx.Node, given: fx.Node) -> fx.Node:
        """Write where values are wrong."""
        low, high = writer.once(self, lambda: self._bounds(writer, origin))
        flags = given.meta["val"].to(torch.bool)
        below = writer.write(origin, flags, aten.lt.Scalar, given, low)
        above = writer.write(origin, flags, aten.gt.Scalar, given, high)
        return writer.write(origin, flags, aten.logical_or.default, below, above)

    def _bounds(self, writer: _Writer, origin: fx.Node) -> tuple[Any, Any]:
        size = self.size
        if isinstance(size, int):
            return (-size if self.from_the_end else 0), size - 1
        length = writer.write(origin, size, aten.sym_size.int, self.source, self.dim)
        low: Any = 0
        if self.from_the_end:
            low = writer.write(origin, -size, operator.mul, length, -1)
        return low, writer.write(origin, size - 1, operator.sub, length, 1)

    def __str__(self) -> str:
        sizes = self.source.meta["val"].shape
        shape = ", ".join(str(size) if isinstance(size, int) else "?" for size in sizes)
        return f"index out of range in dimension {self.dim} of [{shape}]"


@dataclass(frozen=True)
class _NoZero:
    """What must have no zeros."""

    def is_kept(self, known: Interval | None) -> bool:
        """Say whether all values of an interval are right."""
        return known is not None and not known[0] <= 0 <= known[1]

    def is_like(self, other: object) -> bool:
        """Say whether the same values are right for another."""
        return isinstance(other, type(self))

    def is_wrong(self, writer: _Writer, origin: fx.Node, given: fx.Node) -> fx.Node:
        """Write where values are wrong."""
        flags = given.meta["val"].to(torch.bool)
        return writer.write(origin, flags, aten.eq.Scalar, given, 0)


@dataclass(frozen=True)
class _Divisor(_NoZero):
    """What a tensor of integers must be that divides others."""

    kind: ClassVar[Literal["division"]] = "division"

    def keep(self, writer: _Writer, origin: fx.Node, given: fx.Node) -> fx.Node:
        """Write values that are right, and the same where those given are."""
        value = given.meta["val"]
        one = writer.write(origin, value, aten.full_like.default, given, 1)
        is_zero = self.is_wrong(writer, origin, given)
        return writer.write(origin, value, aten.where.self, is_zero, one, given)

    def __str__(self) -> str:
        return "integer division by zero"


@dataclass(frozen=True)
class _Assertion(_NoZero):
    """What is asserted; `torch.nn.functional.one_hot` does so of its classes.

    Attributes:
        text: what is wrong if it does not hold.
    """

    text: str

    kind: ClassVar[Literal["assertion"]] = "assertion"

    def keep(self, writer: _Writer, origin: fx.Node, given: fx.Node) -> fx.Node:
        """Give the values: nothing is computed with them."""
        return given

    def __str__(self) -> str:
        return self.text


_Rule: TypeAlias = _Index | _Divisor | _Assertion


@dataclass(frozen=True)
class _Operand:
    """An operand for which not every value is right.

    Attributes:
        node: the op that takes it.
        place: where among its arguments; in a list of such, also the place in there.
        rule: what it must be.
    """

    node: fx.Node
    place: tuple[int, ...]
    rule: _Rule

    @property
    def given(self) -> fx.Node:
        """The operand."""
        value: Any = self.node.args
        for i in self.place:
            value = value[i]
        return value  # type: ignore[no-any-return]

    @functools.cached_property
    def root(self) -> fx.Node:
        """What has the same elements, and maybe fewer times."""
        node = self.given
        if not has_elements(node.meta["val"]):
            return node  # it may have been expanded to nothing
        while is_one_of(node, _SAME_ELEMENTS) and node.target is not aten.view.dtype:
            node = node.args[0]  # type: ignore[assignment]
        return node

    def replace(self, kept: fx.Node) -> None:
        """Let the op take another."""
        first, *rest = self.place
        value: Any = kept
        if rest:
            value = [*self.node.args[first]]  # type: ignore[misc]
            value[rest[0]] = kept
        self.node.update_arg(first, value)

    def is_checked_with(self, other: _Operand) -> bool:
        """Say whether one check is enough for two."""
        return self.rule.is_like(other.rule) and _are_equal(self.root, other.root)

    @property
    def check(self) -> Check:
        """What is checked."""
        line = user_line(self.node)
        at = f" at {line}" if line.where else ""
        op = self.node.meta.get("original_aten") or self.node.target
        return Check(self.rule.kind, f"{self.rule}: {op}{at}")


def keep_right(graph: fx.Graph) -> tuple[Check, ...]:
    """Keep operands of a region's graph to what eager would take, in place.

    Before: %1 = embedding(%w, %i); return [%1]                              with %w of [50, 8]
    After:  %2 = clamp(%i, 0, 49); %1 = embedding(%w, %2)
            %3 = sum(or(lt(%i, 0), gt(%i, 49))); return [%1, %3]

    What can never be wrong is left alone: an `arange`, an `argmax`, a divisor that is written down.

    Args:
        graph: every node carries its fake tensor; if there is anything to check, it gets one more
            output (see `lowering.signature.Signature.checks`).

    Returns:
        What is checked.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    operands = [operand for node in calls for operand in _operands(node)]
    known = Intervals(graph, [operand.given for operand in operands])
    operands = [o for o in operands if not o.rule.is_kept(known.of(o.given))]
    checked = list[_Operand]()
    for operand in operands:
        if not any(operand.is_checked_with(other) for other in checked):
            checked.append(operand)
    checks = [(operand, operand.root) for operand in checked]  # before they are replaced
    writer = _Writer(graph)
    for operand in operands:
        with graph.inserting_before(operand.node):
            operand.replace(operand.rule.keep(writer, operand.node, operand.given))
    if checks:
        with graph.inserting_before(graph.output_node()):
            number = _first_failure(writer, checks)
        graph.output_node().args = ([*graph.output_node().args[0], number],)  # type: ignore[misc]
    for node in [node for node in calls if is_one_of(node, ASSERTIONS)]:
        graph.erase_node(node)
    return tuple(operand.check for operand in checked)


def _first_failure(writer: _Writer, checks: list[tuple[_Operand, fx.Node]]) -> fx.Node:
    """Write the number of the first check that has failed, counted from 1, or 0.

    Of a check alone it is how many values are wrong: sums are what compilers reduce to best.
    """
    number: Any = None
    for i, (operand, root) in reversed([*enumerate(checks, start=1)]):
        write = functools.partial(writer.write, operand.node)
        one = root.meta["val"].new_empty((), dtype=torch.int64)
        count = write(one, aten.sum.default, operand.rule.is_wrong(writer, operand.node, root))
        if len(checks) == 1:
            return count
        has_failed = write(one.to(torch.bool), aten.ne.Scalar, count, 0)
        own, none = (write(one, aten.full_like.default, count, n) for n in (i, 0))
        number = write(one, aten.where.self, has_failed, own, number or none)
    return number  # type: ignore[no-any-return]


class _Writer:
    """Writes nodes into a graph, each with its fake value, and in the name of a node of it."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._made: dict[_Rule, Any] = {}

    def write(
        self, origin: fx.Node, value: Any, target: Any, /, *args: Any, **kwargs: Any
    ) -> fx.Node:
        """Write a call that gives something like `value`."""
        return write_call(self._graph, origin, value, target, *args, **kwargs)

    def once(self, rule: _Rule, make: Callable[[], Any]) -> Any:
        """Make what a rule needs for all that it is for, at the first of them."""
        if rule not in self._made:
            self._made[rule] = make()
        return self._made[rule]


def _are_equal(one: Any, other: Any, depth: int = _MOST_COMPARED) -> bool:
    """Say whether two arguments are the same, or computed in the same way from the same."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_are_equal(a, b, depth) for a, b in pairs)
    if not (isinstance(one, fx.Node) and isinstance(other, fx.Node)):
        return type(one) is type(other) and bool(one == other)
    if one is other:
        return True
    is_alike = one.op == other.op == "call_function" and one.target == other.target
    if not is_alike or depth == 0 or draws_random_numbers(one) or one.kwargs != other.kwargs:
        return False
    return _are_equal(one.args, other.args, depth - 1)


def _operands(node: fx.Node) -> Iterator[_Operand]:
    """Give the operands of a node for which not every value is right."""
    takes = _TAKES.get(op_name(node.target).rpartition(".")[0])
    for place, rule in takes(node) if takes is not None else ():
        operand = _Operand(node, place, rule)
        given = operand.given
        if isinstance(given, fx.Node) and isinstance(given.meta["val"], torch.Tensor):
            yield operand  # a size that divides is guarded where it is decomposed


_Rules: TypeAlias = Iterator[tuple[tuple[int, ...], _Rule]]


def _of_rows(node: fx.Node) -> _Rules:
    yield (1,), _Index(node.args[0], 0)  # type: ignore[arg-type]


def _along(node: fx.Node) -> _Rules:
    source: Any = node.args[0]
    dim: Any = node.args[1]
    yield (2,), _Index(source, dim % max(1, source.meta["val"].dim()))


def _of_each(from_the_end: bool) -> Callable[[fx.Node], _Rules]:
    def rules(node: fx.Node) -> _Rules:
        source: Any = node.args[0]
        tensors: Any = node.args[1]
        for dim, tensor in enumerate(tensors):
            if tensor is not None and tensor.meta["val"].dtype not in _MASKS:
                yield (1, dim), _Index(source, dim, from_the_end)

    return rules


def _of_quotients(node: fx.Node) -> _Rules:
    if not node.meta["val"].dtype.is_floating_point:
        yield (1,), _Divisor()


def _of_assertions(node: fx.Node) -> _Rules:
    text = node.args[1] if len(node.args) > 1 else ""
    yield (0,), _Assertion(str(text) or "assertion is failed")


# op -> the operands that it takes. A write counts none from the end: its decomposition has done so.
_TAKES: Mapping[str, Callable[[fx.Node], _Rules]] = {
    **dict.fromkeys(ASSERTIONS, _of_assertions),
    "aten.div": _of_quotients,
    "aten.embedding": _of_rows,
    "aten.fmod": _of_quotients,
    "aten.gather": _along,
    "aten.index": _of_each(from_the_end=True),
    "aten.index_put": _of_each(from_the_end=False),
    "aten.index_select": _along,
    "aten.remainder": _of_quotients,
    "aten.scatter": _along,
    "aten.scatter_add": _along,
    "aten.scatter_reduce": _along,
}

"""What is known of the numbers in a graph: the least and the largest that a value can hold."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import fx

from lowering.nodes import MOVE_OPS
from lowering.op_names import op_name

Interval: TypeAlias = tuple[float, float]  # least and largest, both possible
_MOST_READ = 1 << 16  # elements of a constant: more are not looked at
_ROUNDINGS = 4  # of one op on floating-point numbers, at most


class _Unknown(Exception):
    """Nothing is known of a value, not even that it is a number."""


class Intervals:
    """The intervals of nodes of a graph.

    Integers of which nothing is known have that of their dtype; floating-point numbers have none,
    as they may be NaN.
    """

    def __init__(self, graph: fx.Graph, wanted: Iterable[fx.Node]) -> None:
        """Find them.

        Args:
            graph: the graph; every node carries its fake tensor.
            wanted: those of its nodes that will be asked for.
        """
        needed, pending = set[fx.Node](), [*wanted]
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending += node.all_input_nodes
        self._known: dict[fx.Node, Interval | None] = {}
        for node in graph.nodes:
            if node in needed:
                self._known[node] = self._bounded(node)

    def of(self, node: fx.Node) -> Interval | None:
        """Return the interval of a node's elements, or None."""
        return self._known[node]

    def need(self, operand: Any) -> Interval:
        """Return the interval of an operand, a node or a number.

        Raises:
            _Unknown: there is none.
        """
        if isinstance(operand, (bool, int, float)) and math.isfinite(operand):
            return operand, operand
        found = self._known[operand] if isinstance(operand, fx.Node) else None
        if found is None:
            raise _Unknown
        return found

    def _bounded(self, node: fx.Node) -> Interval | None:
        """Find an interval, and see that the dtype holds it: integers wrap."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype.is_complex:
            return None
        try:
            found = self._find(node, value)
        except _Unknown:
            found = None
        if value.dtype.is_floating_point:
            return None if found is None else _with_roundings(found, torch.finfo(value.dtype))
        low, high = _limits(value.dtype)
        return found if found is not None and low <= found[0] <= found[1] <= high else (low, high)

    def _find(self, node: fx.Node, value: torch.Tensor) -> Interval | None:
        if node.op == "get_attr":
            return _of_constant(value)
        args: tuple[Any, ...] = node.args
        name = op_name(node.target).rpartition(".")[0]
        if name in _CARRIES:
            return self.need(args[0]) if args[0].meta["val"].dtype == value.dtype else None
        rule = _RULES.get(name)
        return rule(self, node, *args) if rule is not None else _of_places(node)


def _limits(dtype: torch.dtype) -> Interval:
    if dtype is torch.bool:
        return 0, 1
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _with_roundings(found: Interval, of: torch.finfo) -> Interval | None:
    """Leave room for the roundings of an op; of what may overflow nothing is known."""
    room = _ROUNDINGS * of.eps
    low, high = found[0] - abs(found[0]) * room, found[1] + abs(found[1]) * room
    return (low, high) if of.min < low <= high < of.max else None


def _of_constant(value: torch.Tensor) -> Interval | None:
    if isinstance(value, torch._subclasses.FakeTensor) or not 0 < value.numel() <= _MOST_READ:
        return None
    low, high = value.min().item(), value.max().item()
    return None if math.isnan(low) else (low, high)


def _of_places(node: fx.Node) -> Interval | None:
    """Of an op that says where along a dimension something is, if it is one."""
    source: Any = node
    if node.target is operator.getitem and node.args[1] == 1:
        source = node.args[0]
    name = op_name(source.target).rpartition(".")[0]
    if name not in (_PLACES if source is node else _PLACES_BESIDE_VALUES):
        return None
    shape, (at, default) = source.args[0].meta["val"].shape, _DIMS.get(name, (1, None))
    dim = source.kwargs.get("dim", source.args[at] if len(source.args) > at else default)
    size = math.prod(shape) if dim is None else shape[dim] if shape else 1
    return (0, size - 1) if isinstance(size, int) and size else None


def _hull(*intervals: Interval) -> Interval:
    lows, highs = zip(*intervals, strict=True)
    return min(lows), max(highs)


def _steps(start: Any, count: Any, step: Any) -> Interval:
    if not all(isinstance(number, (int, float)) for number in (start, count, step)) or count < 1:
        raise _Unknown
    return _hull((start, start), (start + (count - 1) * step,) * 2)


def _arange(known: Intervals, node: fx.Node, *numbers: Any) -> Interval:
    start, end, step = {1: (0, *numbers, 1), 2: (*numbers, 1)}.get(len(numbers), numbers)
    if not all(isinstance(number, (int, float)) for number in (start, end, step)):
        raise _Unknown
    count = math.ceil((end - start) / step)
    if not node.meta["val"].dtype.is_floating_point:
        start, step = int(start), int(step)  # the kernel's own, of the result's dtype
    return _steps(start, count, step)


def _iota(known: Intervals, node: fx.Node, length: Any) -> Interval:
    return _steps(node.kwargs["start"], length, node.kwargs["step"])


def _sum(sign: int) -> _Rule:
    def rule(known: Intervals, node: fx.Node, x: Any, y: Any, alpha: Any = 1) -> Interval:
        low, high = known.need(x)
        scale = sign * known.need(node.kwargs.get("alpha", alpha))[0]
        ends = [scale * end for end in known.need(y)]
        return low + min(ends), high + max(ends)

    return rule


def _product(known: Intervals, node: fx.Node, x: Any, y: Any) -> Interval:
    ends = [a * b for a in known.need(x) for b in known.need(y)]
    return min(ends), max(ends)


def _quotient(known: Intervals, node: fx.Node, x: Any, y: Any) -> Interval:
    (low, high), (divisor, other) = known.need(x), known.need(y)
    if divisor != other or divisor <= 0:
        raise _Unknown
    rounded: Any = {"floor": math.floor, "trunc": math.trunc}.get(
        str(node.kwargs.get("rounding_mode")), float
    )
    return rounded(low / divisor), rounded(high / divisor)


def _remainder(known: Intervals, node: fx.Node, x: Any, y: Any) -> Interval:
    known.need(x)
    low, high = known.need(y)
    if low <= 0:
        raise _Unknown
    return 0, high - (not node.meta["val"].dtype.is_floating_point)


def _clamp(
    known: Intervals, node: fx.Node, x: Any, least: Any = None, most: Any = None
) -> Interval:
    found = known.need(x)
    if least is not None:
        found = _larger(found, known.need(least))
    return found if most is None else _smaller(found, known.need(most))


def _larger(one: Interval, other: Interval) -> Interval:
    return max(one[0], other[0]), max(one[1], other[1])


def _smaller(one: Interval, other: Interval) -> Interval:
    return min(one[0], other[0]), min(one[1], other[1])


def _pair(how: Callable[[Interval, Interval], Interval]) -> _Rule:
    return lambda known, node, x, y: how(known.need(x), known.need(y))


def _where(known: Intervals, node: fx.Node, condition: Any, x: Any, y: Any) -> Interval:
    truth = known.need(condition)
    if truth[0] == truth[1]:
        return known.need(x if truth[0] else y)
    return _hull(known.need(x), known.need(y))


def _is_less(one: Interval, other: Interval) -> Interval:
    if one[1] < other[0]:
        return 1, 1
    return (0, 0) if one[0] >= other[1] else (0, 1)


def _of_each(known: Intervals, node: fx.Node, values: Any, *_: Any) -> Interval:
    return _hull(*map(known.need, values))


def _rounded(how: Callable[[float], float]) -> _Rule:
    def rule(known: Intervals, node: fx.Node, x: Any, *_: Any) -> Interval:
        low, high = known.need(x)
        if node.kwargs:  # to so many decimals
            raise _Unknown
        return how(low), how(high)

    return rule


def _converted(place: int) -> _Rule:
    def rule(known: Intervals, node: fx.Node, *args: Any) -> Interval:
        low, high = known.need(args[place])
        dtype = node.meta["val"].dtype
        if dtype is torch.bool:
            if low != high:
                raise _Unknown
            return bool(low), bool(low)
        return (low, high) if dtype.is_floating_point else (math.trunc(low), math.trunc(high))

    return rule


def _negative(known: Intervals, node: fx.Node, x: Any) -> Interval:
    low, high = known.need(x)
    return -high, -low


def _absolute(known: Intervals, node: fx.Node, x: Any) -> Interval:
    low, high = known.need(x)
    return max(low, -high, 0), max(-low, high)


# Their elements are elements of their first argument.
_CARRIES = (MOVE_OPS - {"aten._to_copy", "aten.as_strided", "aten.copy"}) | {
    "aten.embedding",
    "aten.flip",
    "aten.gather",
    "aten.index",
    "aten.index_select",
    "aten.repeat",
}
# They say where along a dimension something is, in their only result or in the second of two.
_PLACES = ("aten.argmax", "aten.argmin", "aten.argsort")
_PLACES_BESIDE_VALUES = ("aten.max", "aten.min", "aten.sort", "aten.topk")
# op -> where among its arguments the dimension is, and what it is if left out; else 1, and all.
_DIMS = {"aten.argsort": (1, -1), "aten.sort": (1, -1), "aten.topk": (2, -1)}
_Rule: TypeAlias = Callable[..., Interval]  # of the intervals, the node and its arguments
_RULES: dict[str, _Rule] = {
    "aten._to_copy": _converted(0),
    "aten.abs": _absolute,
    "aten.add": _sum(1),
    "aten.arange": _arange,
    "aten.cat": _of_each,
    "aten.ceil": _rounded(math.ceil),
    "aten.clamp": _clamp,
    "aten.clamp_max": _pair(_smaller),
    "aten.clamp_min": _pair(_larger),
    "aten.copy": _converted(1),
    "aten.div": _quotient,
    "aten.floor": _rounded(math.floor),
    "aten.full": _converted(1),
    "aten.full_like": _converted(1),
    "aten.lt": _pair(_is_less),
    "aten.maximum": _pair(_larger),
    "aten.minimum": _pair(_smaller),
    "aten.mul": _product,
    "aten.neg": _negative,
    "aten.ones": lambda known, node, *_: (1, 1),
    "aten.remainder": _remainder,
    "aten.round": _rounded(round),
    "aten.scalar_tensor": _converted(0),
    "aten.sub": _sum(-1),
    "aten.trunc": _rounded(math.trunc),
    "aten.where": _where,
    "aten.zeros": lambda known, node, *_: (0, 0),
    "prims.convert_element_type": _converted(0),
    "prims.iota": _iota,
}

"""A region's graph in the form that torch-mlir imports, and lowers rightly."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lowering.nodes import is_number, is_scalar, write_call
from lowering.sizes import are_known, is_static

aten = torch.ops.aten
Size: TypeAlias = Any  # int or SymInt
# Arithmetic on sizes that torch-mlir imports as an op, but not as the function that Dynamo traces.
_OPS_OF_SIZES: Mapping[Any, Any] = {
    torch.sym_max: torch.ops.prim.max.int,
    torch.sym_min: torch.ops.prim.min.int,
}
# What torch-mlir does not take, though the device's sort keeps the order of equal elements, and
# what is not to be sorted may be: op -> the one that it takes, and its arguments by name.
_SORTED: Mapping[Any, tuple[Any, Mapping[str, Any]]] = {
    aten.sort.stable: (aten.sort.default, {}),
    aten.topk.default: (aten.topk.default, {"sorted": True}),
}
# Memory of any strides, which is dense in a region -> where among the arguments the sizes are.
_EMPTY: Mapping[Any, int] = {aten.empty_strided.default: 0, aten.new_empty_strided.default: 1}
# What torch-mlir computes itself of tensors that it knows; whole numbers have no sign for it there.
_FOLDED = tuple(
    getattr(getattr(aten, name), overload)
    for name in ("add", "mul", "rsub", "sub")
    for overload in ("Tensor", "Scalar")
)
# What computes in one dtype, that of all together -> from which argument on these are.
_PROMOTING: Mapping[Any, int] = {aten.cat.default: 0, aten.mul.Tensor: 0, aten.where.self: 1}
_DTYPES = {
    (bool, torch.SymBool): torch.bool,
    (int, torch.SymInt): torch.int64,
    (float, torch.SymFloat): torch.float64,
}


def make_importable(graph: fx.Graph) -> None:
    """Rewrite a region's graph, in place.

    Views of dynamic dimensions merge and split them one by one: torch-mlir guesses which belong
    together, and lowers a view that merges two as if one of them were 1. It is so in a region
    alone, where all values are dense: elsewhere `prims.collapse` is a copy, and `aten.view` none.
    Expansions that repeat nothing are dropped: of dynamic dimensions, torch-mlir would have the
    device find out, number by number, whether they are 1. Sizes taken for tensors become tensors,
    and several indices one: torch-mlir reads by no two that may have to be broadcast. One window is
    read by itself. Remainders of sizes, floats that are counted up to a size, and sorts are made of
    what it takes; numbers beside floats are floats, and so are truths among complex numbers. Floats
    are equal if they do not differ.

    Before: %1 = aten.view(%0, [s0*s1, 8, 8])                      with %0 of [s0, s1, 64]
            %2 = aten.sub.Tensor(%s0, %1)
    After:  %1 = prims.collapse(%0, 0, 1); %2 = aten.unflatten.int(%1, 1, [8, 8])
            %3 = aten.scalar_tensor(%s0, dtype=torch.int64); %4 = aten.sub.Tensor(%3, %2)

    Before: %1 = aten.index.Tensor(%0, [%i, %j])                   with %0 of [s0, s1, 64]
    After:  %1 = aten.add.Tensor(aten.mul.Scalar(%i, %s1), %j)     %i and %j being counted from 0
            %2 = aten.index.Tensor(prims.collapse(%0, 0, 1), [%1])

    Args:
        graph: every node carries its fake value.
    """
    for node in list(graph.nodes):
        writer = _Writer(graph, node)
        with graph.inserting_before(node):
            if isinstance(node.target, torch._ops.OpOverload):
                _make_tensors(writer, node)
            if node.target in _PROMOTING:
                _make_numbers_of_truths(writer, node)
            if node.target in _RULES:
                _RULES[node.target](writer, node)


class _Writer:
    """Writes nodes in the place of one, with fake values as those of their arguments make them."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self._graph, self._origin = graph, node

    def call(self, target: Any, *args: Any, value: Any = None, **kwargs: Any) -> fx.Node:
        """Write a call, of which its fake value may be known."""
        if value is None:
            value = target(*fx.map_arg(args, _value), **kwargs)
        return write_call(self._graph, self._origin, value, target, *args, **kwargs)

    def number(self, number: Any, dtype: torch.dtype, like: torch.Tensor) -> fx.Node:
        """Write a tensor of one number, on the device of another."""
        value = like.new_empty((), dtype=dtype)
        return self.call(aten.scalar_tensor.default, number, dtype=dtype, value=value)

    def size(self, source: fx.Node, dim: int) -> Any:
        """Give a size of a tensor: a number, or what reads it."""
        size = source.meta["val"].shape[dim]
        return size if isinstance(size, int) else self.call(aten.sym_size.int, source, dim)


def _make_tensors(writer: _Writer, node: fx.Node) -> None:
    """Make tensors of the numbers that an op takes for tensors, if it does not take those.

    torch-mlir takes numbers that are known, but none with complex tensors, and as f32 what is the
    first of two operands: of `0.1 - x` in f64, half of the digits are lost.
    """
    taken = zip(node.args, node.target._schema.arguments, strict=False)  # type: ignore[union-attr]
    numbers = {
        i: _value(argument)
        for i, (argument, declared) in enumerate(taken)
        if isinstance(declared.type, torch.TensorType)
        and (is_number(_value(argument)) or isinstance(argument, complex))
    }
    result = node.meta["val"]
    is_complex = isinstance(result, torch.Tensor) and result.is_complex()
    are_taken = all(isinstance(n, (bool, int, float)) for n in numbers.values())
    if not is_complex and are_taken and not (_are_doubles(node) and 0 in numbers):
        return
    for i, number in numbers.items():
        given: Any = node.args[i]
        if is_complex:
            parts = (given, 0.0) if isinstance(given, fx.Node) else (given.real, given.imag)
            made = [writer.number(part, result.dtype.to_real(), result) for part in parts]
            node.update_arg(i, writer.call(aten.complex.default, *made))
        else:
            dtype = next(dtype for kinds, dtype in _DTYPES.items() if isinstance(number, kinds))
            node.update_arg(i, writer.number(given, dtype, result))


def _make_numbers_of_truths(writer: _Writer, node: fx.Node) -> None:
    """Make numbers of truths among complex ones: torch-mlir takes a true one for -1."""
    dtype, first = node.meta["val"].dtype, _PROMOTING[node.target]
    if not dtype.is_complex:
        return

    def number(argument: fx.Node) -> fx.Node:
        if getattr(_value(argument), "dtype", None) is not torch.bool:
            return argument
        return writer.call(torch.ops.prims.convert_element_type.default, argument, dtype.to_real())

    node.args = (*node.args[:first], *fx.map_arg(node.args[first:], number))


def _are_doubles(node: fx.Node) -> bool:
    values = (_value(argument) for argument in node.args)
    return any(isinstance(v, torch.Tensor) and v.dtype is torch.float64 for v in values)


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _import_as_op(_: _Writer, node: fx.Node) -> None:
    node.target = _OPS_OF_SIZES[node.target]


def _take_remainder(writer: _Writer, node: fx.Node) -> None:
    if not is_scalar(node):
        return
    number, divisor = node.args
    whole = writer.call(operator.mul, writer.call(operator.floordiv, number, divisor), divisor)
    node.target, node.args = operator.sub, (number, whole)


def _count_in_integers(writer: _Writer, node: fx.Node) -> None:
    """Count in integers, and make floats of those: torch-mlir would have a float for the length."""
    dtype, limits = node.kwargs.get("dtype"), [_value(argument) for argument in node.args]
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or are_known(limits):
        return
    if all(isinstance(limit, (int, torch.SymInt)) for limit in limits):
        value = node.meta["val"].new_empty(node.meta["val"].shape, dtype=torch.int64)
        whole = writer.call(node.target, *node.args, dtype=torch.int64, value=value)
        node.target, node.kwargs = torch.ops.prims.convert_element_type.default, {}
        node.args = (whole, dtype)


def _compute_with_floats(_: _Writer, node: fx.Node) -> None:
    """Give tensors of floats numbers that are floats, `alpha` among them."""
    if node.meta["val"].is_floating_point():
        node.args = tuple(map(_as_float, node.args))
        node.kwargs = {name: _as_float(value) for name, value in node.kwargs.items()}


def _as_float(value: Any) -> Any:
    return float(value) if type(value) is int else value


def _negate_difference(writer: _Writer, equality: fx.Node) -> None:
    """Ask whether floats differ: torch-mlir drops copies and folds `x == x` to true, with NaN."""
    x, y = equality.args
    if _value(x).is_floating_point():
        differ = writer.call(aten.ne.Tensor, x, y, value=_value(equality))
        equality.target, equality.args = aten.logical_not.default, (differ,)


def _make_dense(_: _Writer, node: fx.Node) -> None:
    sizes = node.args[_EMPTY[node.target]]
    node.args, node.kwargs = (sizes,), {"dtype": node.meta["val"].dtype}
    node.target = aten.empty.memory_format


def _sort(_: _Writer, node: fx.Node) -> None:
    target, fixed = _SORTED[node.target]
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs, **fixed}
    node.target, node.kwargs = target, {}
    node.args = tuple(
        given.get(argument.name, argument.default_value) for argument in target._schema.arguments
    )


def _reads_by_several(node: fx.Node) -> bool:
    """Say whether indices may have to be broadcast to sizes that are not known."""
    values = [_value(index) for index in node.args[1] if index is not None]  # type: ignore[union-attr]
    if len(values) < 2 or any(value.dtype in (torch.bool, torch.uint8) for value in values):
        return False
    return not is_static(*values)


def _widen_indices(writer: _Writer, node: fx.Node) -> None:
    """Take indices as int64: torch-mlir takes no others for reads, nor any beside others."""
    widen = functools.partial(writer.call, torch.ops.prims.convert_element_type.default)
    indices: Any = node.args[1]
    is_narrow = [i is not None and _value(i).dtype is torch.int32 for i in indices]
    if any(is_narrow):
        pairs = zip(indices, is_narrow, strict=True)
        node.update_arg(1, [widen(i, torch.int64) if narrow else i for i, narrow in pairs])


def _read(writer: _Writer, node: fx.Node) -> None:
    _widen_indices(writer, node)
    _read_by_one(writer, node)


def _read_by_one(writer: _Writer, node: fx.Node) -> None:
    if not _reads_by_several(node):
        return
    source, indices = node.args
    places = [dim for dim, index in enumerate(indices) if index is not None]  # type: ignore[arg-type]
    first, count = places[0], len(places)
    if places[-1] != first + count - 1:  # their dimensions are the first of the result, too
        others = [dim for dim in range(_value(source).dim()) if dim not in places]
        source, first = writer.call(aten.permute.default, source, [*places, *others]), 0
    place: Any = None
    for dim, index in enumerate([indices[i] for i in places], start=first):  # type: ignore[index]
        size = writer.size(source, dim)  # type: ignore[arg-type]
        is_counted_back = writer.call(aten.lt.Scalar, index, 0)
        counted = writer.call(aten.add.Scalar, index, size)
        counted = writer.call(aten.where.self, is_counted_back, counted, index)
        rows = writer.call(aten.mul.Scalar, place, size) if place is not None else None
        place = counted if rows is None else writer.call(aten.add.Tensor, rows, counted)
    merged = writer.call(torch.ops.prims.collapse.default, source, first, first + count - 1)
    node.args = (merged, [*[None] * first, place])


def _drop_if_nothing_is_repeated(_: _Writer, node: fx.Node) -> None:
    source: Any = node.args[0]
    old, new = _value(source).shape, _value(node).shape
    is_result = any(user.op == "output" for user in node.users)
    if are_known(new) or len(old) != len(new) or is_result:
        return
    if all(statically_known_true(a == b) for a, b in zip(old, new, strict=True)):
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)


def _take_one_window(writer: _Writer, unfold: fx.Node) -> None:
    """Take the only window by itself: torch-mlir takes all of the tensor to be in it."""
    source, axis, size, _ = unfold.args
    rank, axis = _value(source).dim(), axis % max(1, _value(source).dim())
    if not rank or not statically_known_true(_value(unfold).shape[axis] == 1):
        return
    value = _resized(source, axis, 1, [size])
    window = writer.call(aten.slice.Tensor, source, axis, 0, size, value=value)
    alone = writer.call(aten.unsqueeze.default, window, axis)
    order = [*(d for d in range(rank + 1) if d != axis + 1), axis + 1]
    unfold.replace_all_uses_with(writer.call(aten.permute.default, alone, order))
    unfold.graph.erase_node(unfold)


def _merge_and_split(writer: _Writer, view: fx.Node) -> None:
    source, sizes = view.args
    old, new = _value(source).shape, _value(view).shape
    if are_known([*old, *new]) or not old or not new:
        return
    groups = _shared_factors(old, new) or [(len(old), list(new))]
    for axis, (count, _) in enumerate(groups):
        if count > 1:
            size = math.prod(_value(source).shape[axis : axis + count])
            value = _resized(source, axis, count, [size])
            op = torch.ops.prims.collapse.default
            source = writer.call(op, source, axis, axis + count - 1, value=value)
    ends = list(itertools.accumulate(len(of_group) for _, of_group in groups))
    for axis, (_, of_group) in reversed([*enumerate(groups)]):
        if len(of_group) > 1:
            own = sizes[ends[axis] - len(of_group) : ends[axis]]  # type: ignore[index]
            known = _written_down(writer, source, axis, own, of_group)
            value = _resized(source, axis, 1, of_group)
            source = writer.call(aten.unflatten.int, source, axis, known, value=value)
    view.replace_all_uses_with(source)  # type: ignore[arg-type]
    view.graph.erase_node(view)


def _resized(source: Any, axis: int, count: int, sizes: Sequence[Size]) -> torch.Tensor:
    """Give what stands for a value with other sizes in the place of some.

    The ops that merge and split dimensions would ask how they are stored, and so add guards.
    """
    value = _value(source)
    shape = [*value.shape[:axis], *sizes, *value.shape[axis + count :]]
    return value.new_empty(shape)  # type: ignore[no-any-return]


def _written_down(
    writer: _Writer, source: Any, axis: int, sizes: Any, values: Sequence[Size]
) -> list[Any]:
    """Write down the size that a view leaves open: what the others of its group divide.

    So is one that PyTorch does not know to be the number that the view gives for it.
    """
    pairs = zip(sizes, values, strict=True)
    is_open = [size == -1 or (are_known([size]) and not are_known([n])) for size, n in pairs]
    if True not in is_open:
        return list(sizes)
    place = is_open.index(True)
    left = writer.size(source, axis)
    for other in (*sizes[:place], *sizes[place + 1 :]):
        left = _divided(writer, left, other)
    return [*sizes[:place], left, *sizes[place + 1 :]]


def _divided(writer: _Writer, number: Any, divisor: Any) -> Any:
    if isinstance(number, int) and isinstance(divisor, int):
        return number // divisor
    return writer.call(operator.floordiv, number, divisor)


_RULES: Mapping[Any, Callable[[_Writer, fx.Node], None]] = {
    aten.arange.start_step: _count_in_integers,
    aten.eq.Tensor: _negate_difference,
    aten.expand.default: _drop_if_nothing_is_repeated,
    aten.index.Tensor: _read,
    aten.index_put.default: _widen_indices,
    aten.unfold.default: _take_one_window,
    aten.view.default: _merge_and_split,
    operator.mod: _take_remainder,
    **dict.fromkeys(_EMPTY, _make_dense),
    **dict.fromkeys(_FOLDED, _compute_with_floats),
    **dict.fromkeys(_OPS_OF_SIZES, _import_as_op),
    **dict.fromkeys(_SORTED, _sort),
}


def _shared_factors(
    old: Sequence[Size], new: Sequence[Size]
) -> list[tuple[int, list[Size]]] | None:
    """Match dimensions of two shapes of one size: groups whose products are equal.

    Returns:
        For each group how many old dimensions it has, and its new sizes; None if the sizes do not
        say which belong together.
    """
    groups: list[tuple[int, list[Size]]] = []
    olds, news = list(old), list(new)
    while olds and news:
        count, sizes = 1, [news.pop(0)]
        before, after = olds.pop(0), sizes[0]
        while not statically_known_true(before == after):
            if olds and (not news or _divides(before, after)):
                before, count = before * olds.pop(0), count + 1
            elif news:
                sizes.append(news.pop(0))
                after = after * sizes[-1]
            else:
                return None
        groups.append((count, sizes))
    count, sizes = groups[-1]  # what is left has size 1 and belongs to the last group
    groups[-1] = (count + len(olds), sizes + news)
    return groups


def _divides(divisor: Size, number: Size) -> bool:
    if isinstance(divisor, int) and divisor == 0:
        return False
    return bool(statically_known_true(number % divisor == 0))

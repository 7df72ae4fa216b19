"""Functions of tensors, written down as nodes of a graph."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    _ShapeEnvGuardError,
    statically_known_true,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._sympy.functions import FloorDiv

from lowering.decompositions import decomposition_table
from lowering.nodes import origin_of
from lowering.sizes import is_static

aten = torch.ops.aten
_KEPT = ("full", "mv")  # what a rewrite writes because it is to stay
# How sizes are computed of others.
_ARITHMETIC: Mapping[Any, Callable[[Any, Any], Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
}

# Whether slices are known to lie inside what they slice.
_IS_INSIDE = contextvars.ContextVar("is_inside", default=False)
_NO_LOG = logging.Logger("sizes", logging.CRITICAL)


class _NotWrittenError(Exception):
    """Something cannot be written down: a size that would have to be known, say."""


def part_of(
    x: torch.Tensor, dim: int, start: int, count: int | torch.SymInt, step: int = 1
) -> torch.Tensor:
    """Slice so many of a dimension that has them, even where PyTorch cannot tell that it has."""
    token = _IS_INSIDE.set(True)
    try:
        end = start + (count - 1) * step + 1
        found: torch.Tensor = aten.slice.Tensor(x, dim, start, end, step)
    finally:
        _IS_INSIDE.reset(token)
    return found


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes the ops that run under it into a graph, decomposed.

    PyTorch's own tracers patch its modules while they run; regions are compiled in several threads
    at a time, so this one does not. Those share what knows of their sizes: with unknown ones, one
    thread at a time records (`lowering.rewrites.rewrite` sees to that).

    Sizes that are not known are those of tensors in the graph, or computed of such. A function that
    asks for more than is known of one (`if size > 256`) is not recorded.

    Attributes:
        graph: gets the nodes.
    """

    def __init__(self, graph: fx.Graph, keep_ops: frozenset[str] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph
        self._table = _table(keep_ops)
        self._final: Any = None
        self._fakes = FakeTensorMode()
        self._meta: Mapping[str, Any] = {}
        self._nodes: dict[int, tuple[torch.Tensor, fx.Node]] = {}
        self._sizes: dict[Any, fx.Node | tuple[fx.Node, int]] = {}  # by their expressions
        # What a size is computed of -> the size, and what it is more than so many times that.
        self._parts: dict[Any, tuple[Any, int, int]] = {}
        self._last: fx.Node | None = None  # up to which the sizes are in there

    def record(
        self, function: Callable[..., Any], args: Any, meta: Mapping[str, Any], final: Any = None
    ) -> Any:
        """Call a function.

        Args:
            function: of tensors.
            args: of the call; nodes of the graph stand for tensors.
            meta: of the node that the call stands for.
            final: an op that is not decomposed.

        Returns:
            What the function returned, with nodes in the place of tensors; `NotImplemented` if it
            cannot be written for all sizes that these may be of.
        """
        self._meta, self._final = origin_of(meta), final
        env = self._env_of(args)
        fakes = self._fakes
        with contextlib.ExitStack() as stack:
            if env is not None:
                stack.enter_context(_asks_for_nothing(env))
                fakes = FakeTensorMode(shape_env=env)
                fakes.cache_enabled = False  # it asks for strides, too
            stack.enter_context(fakes)
            stack.enter_context(torch.no_grad())
            args = fx.map_arg(args, self._value)
            try:
                with self:
                    result = function(*args)
                return tree_map_only(torch.Tensor, self._node, result)
            except (_NotWrittenError, _ShapeEnvGuardError, GuardOnDataDependentSymNode):
                return NotImplemented

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_symbolic = not is_static(*(t for t in tree_leaves(args) if isinstance(t, torch.Tensor)))
        if is_symbolic and func in _SHAPES:
            result = _SHAPES[func](*args)
        else:
            if func in self._table and func is not self._final:
                with self:
                    result = self._table[func](*args, **kwargs)
                if result is not NotImplemented:
                    return result
            is_pointwise = is_symbolic and torch.Tag.pointwise in func.tags
            result = (_pointwise if is_pointwise else OpOverload.__call__)(func, *args, **kwargs)
        if not isinstance(result, (torch.Tensor, tuple, list)):
            return result  # what a tensor is: its device, say
        written = tree_map_only(torch.Tensor, self._node, (args, kwargs))
        given, named = tree_map_only(torch.SymInt, self._size, written)
        self._write(func, given, named, result)
        return result

    def _write(self, target: Any, args: Any, kwargs: Any, value: Any) -> None:
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {**self._meta, "val": value}
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = value, node
            return
        for i, part in enumerate(value):
            if part is not None:
                self._write(operator.getitem, (node, i), {}, part)

    def _value(self, node: fx.Node) -> Any:
        """Give what stands for a node: of a tensor, one that is dense, as all of a region are."""
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return value
        fake = torch.empty(value.shape, dtype=value.dtype)
        self._nodes[id(fake)] = fake, node
        return fake

    def _env_of(self, args: Any) -> ShapeEnv | None:
        """Return what knows of sizes that are symbols, if any is; remember where they are."""
        nodes = [node for node in tree_leaves(args) if isinstance(node, fx.Node)]
        values = [node.meta["val"] for node in nodes]
        sizes = [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,))]
        symbolic = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
        if symbolic is None:
            return None
        nodes = reversed(self.graph.nodes)  # type: ignore[arg-type]
        new = list(itertools.takewhile(lambda node: node is not self._last, nodes))
        self._last = new[0] if new else self._last
        for node in reversed(new):
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self._learn(value.node.expr, node)
            elif isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt):
                        self._learn(size.node.expr, (node, dim))
        env: ShapeEnv = symbolic.node.shape_env
        return env

    def _learn(self, expression: Any, where: fx.Node | tuple[fx.Node, int]) -> None:
        self._sizes.setdefault(expression, where)
        more, rest = expression.as_coeff_Add()
        times, part = rest.as_coeff_Mul()
        if part is not expression and more.is_Integer and times.is_Integer:
            self._parts.setdefault(part, (expression, int(more), int(times)))

    def _size(self, size: torch.SymInt) -> int | fx.Node:
        return self._written(size.node.expr, size)

    def _written(self, expression: Any, like: torch.SymInt) -> int | fx.Node:
        """Write a size: as it is known, or of its parts."""
        if expression.is_Integer:
            return int(expression)
        known = self._sizes.get(expression)
        if isinstance(known, fx.Node):
            return known
        if known is not None:
            return self._number(expression, like, aten.sym_size.int, *known)
        if expression in self._parts:
            return self._part(expression, like)
        kind, parts = expression.func, expression.args
        if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
            kind, parts = sympy.Mul, [expression.base] * int(expression.exp)
        if kind not in _ARITHMETIC:
            raise _NotWrittenError(str(expression))
        written = [self._written(part, like) for part in parts]
        whole, so_far = written[0], parts[0]
        for next_one, part in zip(written[1:], parts[1:], strict=True):
            so_far = kind(so_far, part)
            whole = self._number(so_far, like, _ARITHMETIC[kind], whole, next_one)
        return whole

    def _part(self, expression: Any, like: torch.SymInt) -> int | fx.Node:
        """Write what a size is computed of: half of what it is more than 1, say."""
        known, more, times = self._parts[expression]
        whole = self._written(known, like)
        if more:
            whole = self._number(known - more, like, operator.sub, whole, more)
        return (
            whole if times == 1 else self._number(expression, like, operator.floordiv, whole, times)
        )

    def _number(self, expression: Any, like: torch.SymInt, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        value = like.node.shape_env.create_symintnode(expression, hint=None)
        node.meta = {**self._meta, "val": value}
        self._sizes[expression] = node
        return node

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        if id(tensor) not in self._nodes:
            raise _NotWrittenError("a tensor that no node gives")
        return self._nodes[id(tensor)][1]


@contextlib.contextmanager
def _asks_for_nothing(env: ShapeEnv) -> Iterator[None]:
    """Have what asks for more of sizes than is known fail, without a warning."""
    log, env.log = env.log, _NO_LOG
    try:
        with env.error_on_new_guards():
            yield
    finally:
        env.log = log


def _cloned(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _permuted(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return x.new_empty([x.shape[dim] for dim in dims])


def _viewed(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    if any(isinstance(size, int) and size < 0 for size in sizes):
        raise _NotWrittenError(f"a view of {x.shape} as {sizes}")
    return x.new_empty(sizes)


def _sliced(
    x: torch.Tensor, dim: int = 0, start: int | None = 0, end: int | None = None, step: int = 1
) -> torch.Tensor:
    """Give what stands for a slice whose limits are known to lie inside, or to be left out."""
    size, start = x.shape[dim], start or 0
    if end is None or statically_known_true(end >= size):
        end = size
    if not (_IS_INSIDE.get() or _is_inside(start, end, size)):
        raise _NotWrittenError(f"a slice of {size} from {start} to {end}")
    sizes = [*x.shape]
    sizes[dim] = (end - start + step - 1) // step
    return x.new_empty(sizes)


def _is_inside(start: int, end: int, size: int) -> bool:
    return all(map(statically_known_true, (start >= 0, end >= start, end <= size)))


def _padded(x: torch.Tensor, amounts: Sequence[int], value: float = 0) -> torch.Tensor:
    if not all(isinstance(amount, int) and amount >= 0 for amount in amounts):
        raise _NotWrittenError(f"padding by {amounts}")
    sizes = [*x.shape]
    for i in range(0, len(amounts), 2):
        sizes[-1 - i // 2] += amounts[i] + amounts[i + 1]
    return x.new_empty(sizes)


def _pointwise(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Give what stands for the result of an op of each number by itself.

    It has the sizes of its operands, and the dtype that it has where all sizes are 1.
    """
    shapes = [t.shape for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    sizes: list[Any] = []
    for of_dim in itertools.zip_longest(*map(reversed, shapes), fillvalue=1):
        others = [size for size in of_dim if not (isinstance(size, int) and size == 1)]
        if not all(statically_known_true(size == others[0]) for size in others):
            raise _NotWrittenError(f"{func} of {shapes}")
        sizes.insert(0, others[0] if others else 1)
    ones = tree_map_only(torch.Tensor, lambda t: t.new_empty([1] * t.dim()), (args, kwargs))
    result = func(*ones[0], **ones[1])
    if not isinstance(result, torch.Tensor):
        raise _NotWrittenError(f"{func} gives several tensors")
    return result.new_empty(sizes)


def _catenated(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    sizes = [*tensors[0].shape]
    sizes[dim] = sum(tensor.shape[dim] for tensor in tensors)
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return tensors[0].new_empty(sizes, dtype=dtype)


def _convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    _: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    *__: Any,
) -> torch.Tensor:
    if transposed:
        raise _NotWrittenError("a transposed convolution")
    sizes = [
        (size + 2 * pad - apart * (places - 1) - 1) // step + 1
        for size, places, step, pad, apart in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    return x.new_empty([x.shape[0], weight.shape[0], *sizes])


# What gives fake values of sizes that are not known, without asking for strides: all values of a
# region are dense.
_SHAPES: Mapping[OpOverload, Callable[..., torch.Tensor]] = {
    aten.cat.default: _catenated,
    aten.clone.default: _cloned,
    aten.constant_pad_nd.default: _padded,
    aten.convolution.default: _convolved,
    aten.permute.default: _permuted,
    aten.slice.Tensor: _sliced,
    aten.view.default: _viewed,
}


@functools.cache
def _table(keep_ops: frozenset[str]) -> Mapping[OpOverload, Callable[..., Any]]:
    return decomposition_table(keep_ops=(*_KEPT, *keep_ops))

"""Channels last: what lies between two products computes on images as these write and read them.

Products of convolutions have rows of channels (`lowering.rewrites.convolutions`), PyTorch's ops
channels first.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from lowering.nodes import takes_static_tensors
from lowering.rewrites.recorder import Recorder
from lowering.rewrites.windows import Window, to_first, to_last, windows

aten, prims = torch.ops.aten, torch.ops.prims
_UNCHANGED: Any = NotImplemented


def channels_last(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Compute with channels last, from what puts them first to what needs them there.

    Before: %2 = permute(%1, [0, 3, 1, 2]); %3 = relu(%2); %4 = permute(%3, [0, 2, 3, 1])
    After:  %3 = relu(%1)                                           and %3 in the place of %4

    Args:
        graph_module: of a region; every node carries its fake tensor.

    Returns:
        A new graph, or the same one if there is nothing to move.
    """
    walk = _Walk(graph_module)
    if not walk.is_changed:
        return graph_module
    walk.graph.eliminate_dead_code()
    return fx.GraphModule(graph_module, walk.graph)


class _Walk:
    """Writes a graph anew, and remembers what it has with channels last.

    Attributes:
        graph: the new one.
        is_changed: whether it differs from the old one.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph = fx.Graph()
        self.is_changed = False
        self._first = dict[fx.Node, Any]()
        self._last = dict[fx.Node, Any]()
        self._recorder = Recorder(self.graph)
        for node in graph_module.graph.nodes:
            if not self._move(node):
                self._first[node] = self.graph.node_copy(node, self._as_first)
                if node.target is aten.convolution.default and takes_static_tensors(node):
                    self._last[node] = self._permuted(node, self._first[node], to_last)

    def _as_first(self, node: fx.Node) -> Any:
        """Return the value of a node of the old graph, as it was."""
        if node not in self._first:
            self._first[node] = self._permuted(node, self._last[node], to_first)
        return self._first[node]

    def _permuted(self, node: fx.Node, value: Any, order: Callable[[int], list[int]]) -> Any:
        dims = order(node.meta["val"].ndim)
        return self._recorder.record(_permute, (value, dims), node.meta)

    def _move(self, node: fx.Node) -> bool:
        """Write a node with channels last; say whether that was done."""
        pool = _pool_of(node)
        source, function = (node, _OPS.get(node.target)) if pool is None else (pool, _max_pool)
        if not takes_static_tensors(source):
            return False
        if node.target is aten.permute.default:
            return self._move_permute(node)
        if _is_pointwise(node):
            return self._move_pointwise(node)
        operands = source.all_input_nodes
        if function is None or source.kwargs or not operands:
            return False
        if not all(operand in self._last for operand in operands):
            return False
        return self._record(node, function, fx.map_arg(source.args, self._last.__getitem__))

    def _move_permute(self, node: fx.Node) -> bool:
        """Leave out a permutation that puts channels last, or first."""
        source, dims = cast(tuple[fx.Node, Sequence[int]], node.args)
        rank = len(dims)
        order = [d % rank for d in dims]
        if rank < _LEAST_RANK:
            return False
        if order == to_last(rank) and source in self._last:
            self._first[node] = self._last[source]
            self.is_changed = True
        elif order == to_first(rank):
            self._last[node] = self._as_first(source)
        else:
            return False
        return True

    def _move_pointwise(self, node: fx.Node) -> bool:
        """Write an op all of whose operands have channels last, but for what it repeats."""
        value = node.meta["val"]
        images = [n for n in node.all_input_nodes if n.meta["val"].numel() == value.numel()]
        if not images or not all(n in self._last for n in images):
            return False
        operands = dict[fx.Node, Any]()
        for operand in node.all_input_nodes:
            if operand in self._last and operand.meta["val"].ndim == value.ndim:
                operands[operand] = self._last[operand]
            else:
                given = self._as_first(operand), value.ndim
                operands[operand] = self._recorder.record(_aligned, given, node.meta)
        function = functools.partial(cast(Callable[..., Any], node.target), **node.kwargs)
        return self._record(node, function, fx.map_arg(node.args, operands.__getitem__))

    def _record(self, node: fx.Node, function: Callable[..., Any], args: Any) -> bool:
        new = self._recorder.record(function, args, node.meta)
        if new is NotImplemented:
            return False
        has_order = node.meta["val"].ndim >= _LEAST_RANK
        (self._last if has_order else self._first)[node] = new
        self.is_changed = True
        return True


def _is_pointwise(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    tags = node.target.tags
    is_same = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return is_same and not any(isinstance(v, fx.Node) for v in node.kwargs.values())


def _permute(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return x.permute(dims).contiguous()


def _aligned(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Give what is broadcast to images of channels first for images of channels last."""
    if x.ndim == 0:
        return x
    return x.reshape([1] * (rank - x.ndim) + list(x.shape)).permute(to_last(rank))


def _pool_of(node: fx.Node) -> fx.Node | None:
    """Return the pool that a node has the numbers of, not their places."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    pool = cast(fx.Node, node.args[0])
    return pool if pool.target is aten.max_pool2d_with_indices.default else None


def _max_pool(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    if ceil_mode or x.ndim != 4 or not x.dtype.is_floating_point:
        return _UNCHANGED
    window = Window.of(2, kernel, stride or kernel, padding, dilation)
    return functools.reduce(torch.maximum, windows(x, window, -math.inf))


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return torch.cat(list(tensors), _place(dim, tensors[0].ndim))


def _pad(x: torch.Tensor, amounts: Sequence[int], *value: float) -> torch.Tensor:
    of_dims = [amounts[i : i + 2] for i in range(0, len(amounts), 2)]
    of_dims += [[0, 0]] * (x.ndim - len(of_dims))  # the last dimension first
    last = [of_dims[-1 - d] for d in to_last(x.ndim)]
    flat = list(itertools.chain(*reversed(last)))
    y: torch.Tensor = aten.constant_pad_nd.default(x, flat, *value)
    return y


def _mean(x: torch.Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Any:
    places = [_place(d, x.ndim) for d in dims or range(x.ndim)]
    has_order = keepdim or not {0, x.ndim - 1} & {*places}  # of N and C, as they were
    if not has_order and len(places) < x.ndim - 1:
        return _UNCHANGED
    return x.mean(places, keepdim)


def _slice(x: torch.Tensor, dim: int = 0, *bounds: Any) -> torch.Tensor:
    y: torch.Tensor = aten.slice.Tensor(x, _place(dim, x.ndim), *bounds)
    return y


def _place(dim: int, rank: int) -> int:
    """Return where, of channels last, a dimension is."""
    return to_last(rank).index(dim % rank)


def _view(x: torch.Tensor, size: Sequence[int]) -> Any:
    count, *_, channels = x.shape
    return x.reshape(count, *size[2:], channels) if [*size[:2]] == [count, channels] else _UNCHANGED


_LEAST_RANK = 3  # of what has channels and places
_OPS: Mapping[Any, Callable[..., Any]] = {
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    aten.mean.dim: _mean,
    aten.slice.Tensor: _slice,
    aten.view.default: _view,
    prims.convert_element_type.default: prims.convert_element_type.default,
}

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
from torch.fx.experimental.symbolic_shapes import statically_known_true
from typing_extensions import override

from lowering.nodes import takes_tensors
from lowering.rewrites.forms import Forms, is_pointwise
from lowering.rewrites.windows import MOST_PLACES, Window, to_first, to_last, windows
from lowering.sizes import are_same, of_each

aten, prims = torch.ops.aten, torch.ops.prims


class ChannelsLast(Forms):
    """Computes with channels last, from what puts them first to what needs them there.

    Before: %2 = permute(%1, [0, 3, 1, 2]); %3 = relu(%2); %4 = permute(%3, [0, 2, 3, 1])
    After:  %3 = relu(%1)                                           and %3 in the place of %4
    """

    takes = staticmethod(takes_tensors)

    def __init__(self, keep_ops: frozenset[str] = frozenset()) -> None:
        super().__init__(keep_ops)
        self._repeats = dict[fx.Node, Any]()

    @override
    def copied(self, node: fx.Node) -> None:
        if node.target is aten.convolution.default and self.takes(node):
            value = self._permuted(node, self.plain[node], to_last)
            if value is not NotImplemented:
                self.moved[node] = value

    @override
    def restored(self, node: fx.Node) -> Any:
        return self._permuted(node, self.moved[node], to_first)

    @override
    def leads(self, operand: fx.Node, node: fx.Node) -> bool:
        return _leads(operand.meta["val"].shape, node.meta["val"].shape)

    @override
    def aligned(self, operand: fx.Node, node: fx.Node) -> Any:
        given, rank = operand.meta["val"], node.meta["val"].ndim
        if statically_known_true(given.numel() == node.meta["val"].numel()):
            # To move an image with channels first costs what this is to save.
            return self._repeated(operand) if given.ndim == rank else None
        if operand in self.moved and given.ndim == rank:
            return self.moved[operand]
        return self.write(node, _aligned, self.as_plain(operand), rank)

    @override
    def move(self, node: fx.Node) -> bool:
        if node.target is aten.permute.default:
            return self.takes(node) and self._move_permute(node)
        if node.target in _COPIES and node.all_input_nodes[0] in self.moved:
            self.moved[node] = self.moved[node.all_input_nodes[0]]  # all that a region has is dense
            return True
        if self.move_pointwise(node):
            return True
        pool = _pool_of(node)
        source, function = (node, _OPS.get(node.target)) if pool is None else (pool, _max_pool)
        operands = source.all_input_nodes
        if function is None or source.kwargs or not operands or not self.takes(source):
            return False
        if not all(self._is_moved(operand) for operand in operands):
            return False
        args = fx.map_arg(source.args, lambda n: self.moved.get(n) or self.as_plain(n))
        return self.moves(node, self.write(node, function, *args))

    @override
    def moves(self, node: fx.Node, value: Any) -> bool:
        is_moved = super().moves(node, value)
        if is_moved and node.meta["val"].ndim < _LEAST_RANK:
            self.plain[node] = self.moved.pop(node)
        return is_moved

    def _repeated(self, node: fx.Node) -> Any:
        """Write what is one number at all places of a channel; None: it may not be.

        Such is the gradient of a mean.
        """
        if node not in self._repeats:
            self._repeats[node] = self._written_repeated(node)
        return self._repeats[node]

    def _written_repeated(self, node: fx.Node) -> Any:
        if node.target is aten.expand.default:
            source, sizes = cast(tuple[fx.Node, Sequence[int]], node.args)
            shape = source.meta["val"].shape
            if len(shape) != len(sizes) or not are_same(shape[2:], [1] * (len(sizes) - 2)):
                return None
            return self.write(node, _expand, self.as_plain(source), sizes)
        operands = node.all_input_nodes
        if not is_pointwise(node) or len(operands) != 1:
            return None
        value = self._repeated(operands[0])
        if value is None or value is NotImplemented:
            return value
        return self.write_of(node, {operands[0]: value})

    def _move_permute(self, node: fx.Node) -> bool:
        """Leave out a permutation that puts channels last, or first; make one of any other two."""
        source, dims = cast(tuple[fx.Node, Sequence[int]], node.args)
        rank = len(dims)
        order = [d % rank for d in dims]
        if rank < _LEAST_RANK:
            return False
        if order == to_last(rank) and source in self.moved:
            self.plain[node] = self.moved[source]
            self.is_changed = True
            return True
        if order == to_first(rank):
            self.moved[node] = self.as_plain(source)
            return True
        if source in self.moved:
            whole = [to_first(rank)[d] for d in order]
            self.plain[node] = self.write(node, _permute, self.moved[source], whole)
            return True
        return False

    def _is_moved(self, operand: fx.Node) -> bool:
        return operand in self.moved or isinstance(operand.meta["val"], torch.SymInt)

    def _permuted(self, node: fx.Node, value: Any, order: Callable[[int], list[int]]) -> Any:
        return self.write(node, _permute, value, order(node.meta["val"].ndim))


def images_of(graph: fx.Graph) -> set[fx.Node]:
    """Return what `ChannelsLast` has with channels last, where the graph computes all of it anew.

    Args:
        graph: functional, with convolutions as they are captured; every node carries its value.
    """
    found = set[fx.Node]()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        source = _pool_of(node) or node
        given = [n for n in source.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        if node.target is aten.convolution.default:
            is_image = value.ndim >= _LEAST_RANK
        elif is_pointwise(node):
            is_image = any(n in found and _leads(n.meta["val"].shape, value.shape) for n in given)
        else:
            is_moved = source is not node or (node.target in _OF_IMAGES and not node.kwargs)
            is_of_images = is_moved or node.target in _COPIES
            is_image = is_of_images and bool(given) and found.issuperset(given)
        if is_image:
            found.add(node)
    return found


def _leads(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Say whether something has all images and channels of what is computed of it."""
    return len(shape) == len(whole) and are_same(shape[:2], whole[:2])


def _permute(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return x.permute(dims).clone(memory_format=torch.contiguous_format)


def _aligned(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Give what is broadcast to images of channels first for images of channels last."""
    if x.ndim == 0:
        return x
    return x.reshape([1] * (rank - x.ndim) + list(x.shape)).permute(to_last(rank))


def _expand(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    order = to_last(x.ndim)
    return x.permute(order).expand([sizes[dim] for dim in order])


def _pool_of(node: fx.Node) -> fx.Node | None:
    """Return the pool that a node has the numbers of, not their places, if it is written out."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    pool = cast(fx.Node, node.args[0])
    is_pool = pool.target is aten.max_pool2d_with_indices.default and not pool.kwargs
    return pool if is_pool and _is_written_out(pool) else None


def _is_written_out(pool: fx.Node) -> bool:
    x, kernel, *options = cast(Any, pool.args)
    value, has_ceil_mode = x.meta["val"], any(options[3:])
    is_small = math.prod(of_each(kernel, 2)) <= MOST_PLACES
    return not has_ceil_mode and value.ndim == 4 and is_small and value.dtype.is_floating_point


def _max_pool(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    *_: bool,
) -> Any:
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


def _reduced(
    op: Callable[..., torch.Tensor],
    x: torch.Tensor,
    dims: Sequence[int] | None,
    keepdim: bool = False,
) -> Any:
    places = [_place(d, x.ndim) for d in dims or range(x.ndim)]
    has_order = keepdim or not {0, x.ndim - 1} & {*places}  # of N and C, as they were
    if not has_order and len(places) < x.ndim - 1:
        return NotImplemented
    return op(x, places, keepdim)


def _slice(x: torch.Tensor, dim: int = 0, *bounds: Any) -> torch.Tensor:
    y: torch.Tensor = aten.slice.Tensor(x, _place(dim, x.ndim), *bounds)
    return y


def _place(dim: int, rank: int) -> int:
    """Return where, of channels last, a dimension is."""
    return to_last(rank).index(dim % rank)


def _unsqueeze(x: torch.Tensor, dim: int) -> Any:
    rank = x.ndim + 1
    return x.unsqueeze(_place(dim, rank)) if dim % rank > 1 else NotImplemented


def _view(x: torch.Tensor, size: Sequence[int]) -> Any:
    count, *_, channels = x.shape
    return (
        x.reshape(count, *size[2:], channels)
        if are_same(size[:2], [count, channels])
        else NotImplemented
    )


_LEAST_RANK = 3  # of what has channels and places
# What gives images of images, wherever these have channels.
_OF_IMAGES: Mapping[Any, Callable[..., Any]] = {
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    aten.slice.Tensor: _slice,
    prims.convert_element_type.default: prims.convert_element_type.default,
}
_OPS: Mapping[Any, Callable[..., Any]] = {
    **_OF_IMAGES,
    aten.mean.dim: functools.partial(_reduced, aten.mean.dim),
    aten.sum.dim_IntList: functools.partial(_reduced, aten.sum.dim_IntList),
    aten.unsqueeze.default: _unsqueeze,
    aten.view.default: _view,
}
_COPIES = frozenset({aten.alias.default, aten.clone.default})

"""Sums of very many numbers as sums of sums: as precise as eager's, and computed by all threads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lowering.rewrites.recorder import part_of
from lowering.rewrites.rule import Arguments, Rule

aten = torch.ops.aten
_MOST = 1 << 10  # numbers that are added up at once, where a dimension is divided
# More numbers than this take two steps. A row has some 32 sums, of which one is made; a step more
# of many rows costs that they are no longer computed together with what else is of them.
_LONG, _LONG_ROW, _LONG_ROWS = 1 << 14, 1 << 17, 1 << 18
_FEW = 64  # rows
_MEANS = (aten.mean.default, aten.mean.dim)


def sum_of_sums(x: torch.Tensor, dims: Sequence[int], keepdim: bool, is_mean: bool) -> Any:
    """Rewrite `aten.sum.dim_IntList` and `aten.mean` of many numbers.

    One number after the other is added, to a few sums at most. Of a million times 0.1, the result
    is off by 3e-4 along rows, and by 1e-2 along columns; eager's, which adds up in a tree, by 1e-7.

    Before: %y = sum(%x, [0])                                  with %x of [N * K, C]
    After:  %1 = sum(view(%x, [N, K, C]), [1]); %y = sum(%1, [0])

    Args:
        x: of float32.
        dims: along which it is added up, in order, none of them negative.
        keepdim: whether these stay, with one number each.
        is_mean: whether the sum is divided by how many numbers it is of.
    """
    count = math.prod(x.shape[d] for d in dims)
    if count <= _most(x, dims):
        return NotImplemented
    y = _summed(x, list(dims))
    if is_mean:
        y = y / count
    return y.view([1 if d in dims else size for d, size in enumerate(x.shape)]) if keepdim else y


def _most(x: torch.Tensor, dims: Sequence[int]) -> int:
    if list(dims) != list(range(x.dim() - len(dims), x.dim())):
        return _LONG
    rows = math.prod(x.shape[: x.dim() - len(dims)])
    return _LONG_ROW if rows <= _FEW else _LONG_ROWS


def _summed(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Add up along the last dimensions, or a part of the last, and so on."""
    last, count = dims[-1], x.shape[dims[-1]]
    if count <= _MOST:
        sizes = [x.shape[d] for d in dims]
        begin = next(i for i, _ in enumerate(dims) if math.prod(sizes[i:]) <= _LONG)
        y = x.sum(dims[begin:])
        return _summed(y, dims[:begin]) if begin else y
    whole = count // _MOST * _MOST
    first = x if whole == count else part_of(x, last, 0, whole)
    divided = first.reshape([*x.shape[:last], -1, _MOST, *x.shape[last + 1 :]])
    y = _summed(divided, [*dims, last + 1])
    if whole == count:
        return y
    return y + _summed(part_of(x, last, whole, count - whole), dims)


def _taken(node: fx.Node) -> Arguments | None:
    if node.kwargs.keys() - {"dtype"}:
        return None
    args: Sequence[Any] = [*node.args, *(None, False)[len(node.args) - 1 :]]
    x, dims, keepdim = args
    value = x.meta["val"]
    is_wide = value.dtype == torch.float32 and node.kwargs.get("dtype") in (None, torch.float32)
    if not is_wide or not value.dim():
        return None
    every = dims or range(value.dim())
    return x, sorted(d % value.dim() for d in every), keepdim, node.target in _MEANS


RULES: Mapping[Any, Rule] = dict.fromkeys(
    (aten.sum.dim_IntList, *_MEANS), Rule(sum_of_sums, _taken)
)

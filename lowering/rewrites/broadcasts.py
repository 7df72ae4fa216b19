"""Moves of what ops make of small tensors by broadcasting: the small ones are moved instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lowering.rewrites.forms import is_pointwise
from lowering.rewrites.rule import Arguments, Rule

aten = torch.ops.aten
_MOVES = frozenset({aten.permute.default, aten.slice.Tensor})
_LEAST_GROWTH = 8  # times as many elements as in any tensor that they are made of
_MOST_OPS = 8
_MOST_COMPUTED = 1.5  # times as many as before, where moves overlap

_Moves = Sequence[tuple[Any, Sequence[Any]]]
# An op, and what it is called with: nodes or tensors, numbers, and (where a tuple) others of these.
_Tree = tuple[Any, ...]


def moved(tree: _Tree, moves: _Moves) -> Any:
    """Rewrite a move of what is made by broadcasting.

    A move of the result is a device program of its own, which reads and writes all of it; moves of
    the small tensors cost next to nothing, and the ops become part of what reads their results.
    Where slices overlap, they are computed again: the scan of Mamba takes every second element,
    the others, and these but the first.

    Before: %y = slice(permute(exp(mul(%a, %b)), [2, 0, 1, 3]), 0, 1, None, 2)
                                             with %a of [1, C, 1, S], %b of [1, C, T, 1]
    After:  %c = permute(%a, [2, 0, 1, 3]); %d = slice(permute(%b, [2, 0, 1, 3]), 0, 1, None, 2)
            %y = exp(mul(%c, %d))

    Args:
        tree: the ops, the last one first.
        moves: the others, in order.
    """
    return _evaluate(tree, max(tensor.ndim for tensor in _tensors(tree)), moves)


def _tensors(tree: _Tree) -> Iterator[Any]:
    for operand in tree[1:]:
        if isinstance(operand, tuple):
            yield from _tensors(operand)
        elif isinstance(operand, torch.Tensor):
            yield operand


def _evaluate(value: Any, rank: int, moves: _Moves) -> Any:
    if isinstance(value, tuple):
        op, *operands = value
        return op(*(_evaluate(operand, rank, moves) for operand in operands))
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    if value.ndim < rank:
        value = value.view([1] * (rank - value.ndim) + list(value.shape))
    for move, args in moves:
        if move is not aten.slice.Tensor or _length(value, *args) > 1:
            value = move(value, *args)
    return value


def _tree(node: fx.Node) -> Arguments | None:
    """Take the small tensors, the ops that are made of them, and the moves."""
    moves = list[tuple[Any, Any]]()
    source: Any = node
    while isinstance(source, fx.Node) and source.target in _MOVES and not source.kwargs:
        moves.insert(0, (source.target, source.args[1:]))
        source = source.args[0]
        if moves[0][0] is aten.slice.Tensor and _length(source.meta["val"], *moves[0][1]) <= 1:
            return None  # of which the tensors that are repeated could not be told
    if not _is_pointwise(source):
        return None
    value = source.meta["val"]
    ends = sum(end.meta["val"].numel() for end in _ends(source))
    tree = _made_of(source, value.shape, [_MOST_OPS])
    if tree is None or ends > _MOST_COMPUTED * value.numel():
        return None
    return tree, moves


def _length(tensor: torch.Tensor, dim: int = 0, *_: Any) -> int:
    """Return how long a tensor is where a slice cuts it."""
    return tensor.shape[dim]


def _is_pointwise(node: Any) -> bool:
    return isinstance(node, fx.Node) and is_pointwise(node) and not node.kwargs


def _ends(node: fx.Node) -> Iterator[fx.Node]:
    """Give what a node's values are read as, after moves."""
    moves = [user for user in node.users if user.target in _MOVES]
    if len(moves) < len(node.users):
        yield node
    for move in moves:
        yield from _ends(move)


def _made_of(node: fx.Node, shape: torch.Size, budget: list[int]) -> _Tree | None:
    """Return the ops that make a node, if all that they are made of is small."""
    budget[0] -= 1
    if budget[0] < 0:
        return None
    operands = list[Any]()
    for operand in node.args:
        if isinstance(operand, fx.Node):
            value = operand.meta["val"]
            if not isinstance(value, torch.Tensor):
                return None
            if value.numel() * _LEAST_GROWTH > shape.numel():
                if not _is_pointwise(operand) or value.shape != shape:
                    return None
                operand = _made_of(operand, shape, budget)
                if operand is None:
                    return None
        operands.append(operand)
    return (node.target, *operands)


RULES: Mapping[Any, Rule] = {move: Rule(moved, _tree) for move in _MOVES}

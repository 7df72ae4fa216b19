"""How much a region computes at most: decides whether a call is worth waking another thread."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._library.utils import is_builtin
from torch._ops import HigherOrderOperator, OpOverload

from lowering.expressions import Sizes, expression_of, value_of
from lowering.region import Region

aten = torch.ops.aten

_LEAST_OF_A_STEP = 1 << 10  # a step costs something, however little it combines
# Combinations that take as long as a function of a number, such as its exponential; those of
# doubles are computed one by one.
_OF_A_NUMBER, _OF_A_DOUBLE = 16, 64
_DOUBLES = frozenset({torch.float64, torch.complex64, torch.complex128})
_BY_NUMBERS = frozenset({torch.Tag.pointwise, torch.Tag.reduction})
# Products of matrices, by the place of the left factor among their arguments.
_LEFT_FACTORS: Mapping[Any, int] = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}


@dataclass(frozen=True)
class Effort:
    """What of a region says how long it takes.

    Attributes:
        steps: how many ops combine how many numbers at most, as Python expressions of the region's
            size symbols.
    """

    steps: Mapping[str, int]

    @classmethod
    def of(cls, region: Region) -> Effort:
        """Read it off a region's graph."""
        calls = [n for n in region.graph_module.graph.nodes if n.op == "call_function"]
        return cls(Counter(expression_of(_work(n)) for n in calls if not _is_view(n)))

    def bound(self, sizes: Sizes) -> int:
        """Return how many numbers are combined at most.

        Args:
            sizes: the values of the size symbols.
        """
        return sum(
            count * max(int(value_of(work, sizes)), _LEAST_OF_A_STEP)
            for work, count in self.steps.items()
        )


def is_static(region: Region) -> bool:
    """Say whether no size of a region's tensors can change."""
    tensors = (t for n in region.graph_module.graph.nodes for t in _tensors(n))
    return all(isinstance(size, int) for t in tensors for size in t.shape)


def _work(node: fx.Node) -> Any:
    """Return how many numbers an op combines: if nothing is known of it, every one with every."""
    target: Any = node.target
    if not _ends_soon(target):
        return sys.maxsize
    if target in _LEFT_FACTORS:
        left: Any = node.args[_LEFT_FACTORS[target]]
        return node.meta["val"].numel() * left.meta["val"].shape[-1]
    every = [t for n in (node, *node.all_input_nodes) for t in _tensors(n)]
    largest = functools.reduce(torch.sym_max, (t.numel() for t in every), 0)
    if isinstance(target, OpOverload) and not _BY_NUMBERS.isdisjoint(target.tags):
        are_doubles = any(t.dtype in _DOUBLES for t in every)
        return largest * (_OF_A_DOUBLE if are_doubles else _OF_A_NUMBER)
    return largest**2


def _is_view(node: fx.Node) -> bool:
    """Say whether a node computes nothing: a view, or one of several results."""
    target = node.target
    return target.is_view if isinstance(target, OpOverload) else _ends_soon(target)


def _ends_soon(target: object) -> bool:
    """Say whether an op takes no longer than its tensors are large: no loop, no user's kernel."""
    if isinstance(target, OpOverload):
        return bool(is_builtin(target))
    return not isinstance(target, HigherOrderOperator)


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return (v for v in values if isinstance(v, torch.Tensor))

"""How much a region computes at most: decides whether a call is worth waking another thread."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch._library.utils import is_builtin
from torch._ops import HigherOrderOperator, OpOverload

from lowering.expressions import Sizes, expression_of, value_of
from lowering.region import Region

_LEAST_OF_A_STEP = 1 << 10  # a step costs something, however little it combines


@dataclass(frozen=True)
class Effort:
    """What of a region says how long it takes.

    Attributes:
        steps: how many ops it has.
        elements: of each of its tensors, as Python expressions of its size symbols.
    """

    steps: int
    elements: tuple[str, ...]

    @classmethod
    def of(cls, region: Region) -> Effort:
        """Read it off a region's graph."""
        nodes = region.graph_module.graph.nodes
        values = [n.meta.get("val") for n in nodes]
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        calls = [n for n in nodes if n.op == "call_function"]
        return cls(
            steps=len(calls) if all(_ends_soon(n.target) for n in calls) else sys.maxsize,
            elements=tuple(dict.fromkeys(expression_of(t.numel()) for t in tensors)),
        )

    @property
    def is_static(self) -> bool:
        """Whether no size can change."""
        return all(e.isdecimal() for e in self.elements)

    def bound(self, sizes: Sizes) -> int:
        """Return how many numbers are combined at most: in each op, every one with every other.

        Args:
            sizes: the values of the size symbols.
        """
        largest = max((int(value_of(e, sizes)) for e in self.elements), default=0)
        return self.steps * max(largest**2, _LEAST_OF_A_STEP)


def _ends_soon(target: object) -> bool:
    """Say whether an op takes no longer than its tensors are large: no loop, no user's kernel."""
    if isinstance(target, OpOverload):
        return bool(is_builtin(target))
    return not isinstance(target, HigherOrderOperator)

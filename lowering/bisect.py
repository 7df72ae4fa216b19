"""Find out which nodes of a refused region are to blame, in as few compiles as it takes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lowering.errors import StageError

Try = Callable[[Sequence[fx.Node]], StageError | None]


@dataclass
class Diagnosis:
    """What to do with the nodes of a region that the compiler refused.

    Attributes:
        blamed: nodes that fail alone, and how; they go to the host.
        parts: groups of nodes that compile apart, but not together; they become regions.
    """

    blamed: dict[fx.Node, StageError] = field(default_factory=dict)
    parts: list[list[fx.Node]] = field(default_factory=list)


def diagnose(nodes: Sequence[fx.Node], error: StageError, attempt: Try) -> Diagnosis:
    """Bisect a failing region.

    A half that compiles is not looked into again: one bad op among n costs about 2 log2(n)
    compiles. Each op alike is then tried alone: one compile, as long as none of them works. If both
    halves compile, the failure is in their combination, and they are kept apart.

    Args:
        nodes: the region, in graph order; it fails as a whole.
        error: how it fails.
        attempt: compiles some of the nodes as a region of their own; None means that it worked.
    """
    return _Bisection(attempt).diagnose(units_of(nodes), error)


@dataclass
class _Bisection:
    """What is known while a region is bisected.

    Attributes:
        attempt: see `diagnose`.
        cleared: kinds of ops that were to blame in one place, and worked alone in another.
    """

    attempt: Try
    cleared: set[Hashable] = field(default_factory=set)

    def diagnose(self, units: Sequence[list[fx.Node]], error: StageError) -> Diagnosis:
        """Bisect what fails as a whole."""
        if len(units) == 1:
            return Diagnosis(blamed=dict.fromkeys(units[0], error))
        middle = len(units) // 2
        found = Diagnosis()
        for half in (units[:middle], units[middle:]):
            left = self._blame_alike(half, found)
            part = [n for unit in left for n in unit]
            failure = self.attempt(part) if part else None
            if failure is None:
                found.parts.append(part)
                continue
            inner = self.diagnose(left, failure)
            found.blamed.update(inner.blamed)
            found.parts += inner.parts
        if found.blamed:
            found.parts = []  # without what is to blame, the rest may well compile as one
        return found

    def _blame_alike(
        self, units: Sequence[list[fx.Node]], found: Diagnosis
    ) -> Sequence[list[fx.Node]]:
        """Try alone what is like those to blame; give what is not found to be so, too."""
        kinds, left = {_kind(node) for node in found.blamed}, []
        for unit in units:
            kind = _kind(unit[0])
            if kind in kinds - self.cleared:
                failure = self.attempt(unit)
                if failure is not None:
                    found.blamed.update(dict.fromkeys(unit, failure))
                    continue
                self.cleared.add(kind)
            left.append(unit)
        return left


def _kind(node: fx.Node) -> Hashable:
    """Give what is equal for ops that are likely to fail alike: sizes and numbers are left out."""
    arguments = pytree.tree_leaves((node.args, node.kwargs))
    values = [a.meta.get("val") if isinstance(a, fx.Node) else a for a in arguments]
    described = ((v.dtype, v.dim()) if isinstance(v, torch.Tensor) else type(v) for v in values)
    return node.target, *described


def units_of(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Keep a node and what takes its result apart together."""
    units: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source in units:
            units[source].append(node)
        else:
            units[node] = [node]
    return list(units.values())

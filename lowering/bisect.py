"""Find out which nodes of a refused region are to blame, in as few compiles as it takes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import fx

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
    compiles. If both halves compile, the failure is in their combination, and they are kept apart.

    Args:
        nodes: the region, in graph order; it fails as a whole.
        error: how it fails.
        attempt: compiles some of the nodes as a region of their own; None means that it worked.
    """
    units = units_of(nodes)
    if len(units) == 1:
        return Diagnosis(blamed=dict.fromkeys(units[0], error))
    middle = len(units) // 2
    halves = [[n for unit in half for n in unit] for half in (units[:middle], units[middle:])]
    found = Diagnosis()
    errors = [attempt(half) for half in halves]
    for half, failure in zip(halves, errors, strict=True):
        if failure is None:
            found.parts.append(half)
            continue
        inner = diagnose(half, failure, attempt)
        found.blamed.update(inner.blamed)
        found.parts += inner.parts
    if found.blamed:
        found.parts = []  # without what is to blame, the rest may well compile as one
    return found


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

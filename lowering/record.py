"""What a bundle keeps of one captured graph: how it was cut, and what healing found; as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import fx

from lowering.canonical import canonical_text
from lowering.capture import CapturedGraph
from lowering.digest import text_digest
from lowering.errors import HostOp
from lowering.plan import Plan
from lowering.region import memory_order

# Sizes have no upper bound that a machine would reach; PyTorch's infinity is not in JSON.
_UNBOUNDED = 1 << 62


@dataclass
class Healed:
    """What was found out about a graph.

    Attributes:
        failed: nodes that the compiler refuses, and why.
        apart: nodes that it only takes apart: those with different numbers.
    """

    failed: dict[fx.Node, str] = field(default_factory=dict)
    apart: dict[fx.Node, int] = field(default_factory=dict)

    def keep_apart(self, parts: Sequence[Sequence[fx.Node]]) -> None:
        """Give each part a number of its own."""
        first = max(self.apart.values(), default=0) + 1
        for number, part in enumerate(parts, start=first):
            self.apart |= dict.fromkeys(part, number)


@dataclass(frozen=True, kw_only=True)
class GraphRecord:
    """One graph of a bundle. Nodes are counted among those that compute something, in order.

    Attributes:
        digest: SHA-256 of its canonical text.
        kind: `inference`, `forward` (of training) or `backward`.
        plan: its schedule, for people.
        host_ops: what runs on the host, and why.
        failed: node -> why the compiler refused it.
        apart: node -> number; the compiler took those with different numbers only apart.
        symbols: symbolic size -> (least, largest; None: no bound) that its guards allow.
        regions: region -> digest of its artifact.
    """

    digest: str
    kind: str
    plan: str
    host_ops: tuple[HostOp, ...]
    failed: Mapping[int, str]
    apart: Mapping[int, int]
    symbols: Mapping[str, tuple[int, int | None]]
    regions: Mapping[str, str]

    @classmethod
    def of(
        cls,
        captured: CapturedGraph,
        text: str,
        plan: Plan,
        healed: Healed,
        regions: Mapping[str, str],
    ) -> GraphRecord:
        """Write down what was decided for a graph."""
        numbers = {node: i for i, node in enumerate(captured.nodes)}
        return cls(
            digest=text_digest(text),
            kind=captured.kind,
            plan=str(plan),
            host_ops=plan.host_ops,
            failed={numbers[node]: reason for node, reason in healed.failed.items()},
            apart={numbers[node]: number for node, number in healed.apart.items()},
            symbols=_symbol_ranges(captured),
            regions=dict(regions),
        )

    def healed(self, captured: CapturedGraph) -> Healed:
        """Return what was found out about the graph, as it is captured now.

        Raises:
            ValueError: the record is not of this graph.
        """
        nodes = captured.nodes
        if any(not 0 <= i < len(nodes) for i in (*self.failed, *self.apart)):
            raise ValueError(f"the record of graph {self.digest} names an op that is not in it")
        return Healed(
            {nodes[i]: reason for i, reason in self.failed.items()},
            {nodes[i]: number for i, number in self.apart.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> GraphRecord:
        """Read what `to_json` made.

        Raises:
            ArithmeticError, AttributeError, KeyError, TypeError, ValueError: it makes no sense.
        """
        return cls(
            digest=str(row["digest"]),
            kind=str(row["kind"]),
            plan=str(row["plan"]),
            host_ops=tuple(HostOp(**op) for op in row["host_ops"]),
            failed={int(i): str(reason) for i, reason in row["failed"].items()},
            apart={int(i): int(number) for i, number in row["apart"].items()},
            symbols={str(s): (low, high) for s, (low, high) in row["symbols"].items()},
            regions={str(name): str(digest) for name, digest in row["regions"].items()},
        )


def graph_text(captured: CapturedGraph) -> str:
    """Return the canonical text of a captured graph, with what is bound and how inputs lie."""
    notes = {node: _note(captured, node) for node in captured.inputs}
    return canonical_text(captured.graph_module, notes)


def _note(captured: CapturedGraph, node: fx.Node) -> str:
    value = node.meta.get("val")
    bound = " bound" if node in captured.weights else ""
    bound += " written" if node in captured.written else ""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return bound
    order = memory_order(value)
    natural = order == tuple(range(len(order)))
    return bound if natural else f"{bound} in memory order {','.join(map(str, order))}"


def _symbol_ranges(captured: CapturedGraph) -> dict[str, tuple[int, int | None]]:
    ranges: dict[str, tuple[int, int | None]] = {}
    for node in captured.inputs:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                known = size.node.shape_env.var_to_range
                for symbol in size.node.expr.free_symbols:
                    ranges[str(symbol)] = _range(known.get(symbol))
    return dict(sorted(ranges.items()))


def _range(known: Any) -> tuple[int, int | None]:
    if known is None:
        return (0, None)
    is_bounded = known.upper.is_integer and known.upper < _UNBOUNDED
    low = int(known.lower) if known.lower > -_UNBOUNDED else -_UNBOUNDED  # a number, not a size
    return (low, int(known.upper) if is_bounded else None)

"""Grow segments: nodes that run together on the device, or together on the host.

Nodes are put on levels: a node's level is one more than that of a predecessor in the other space,
and the same as that of one in its own space. Nodes of one level and space can therefore never
depend on each other through another segment (every segment is convex, and the segments have no
cycle). Within a level, what is not connected stays apart if it waits for, or is waited for by,
different segments, so that independent regions can overlap.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from torch import fx

from lowering.nodes import VIEW_OPS, has_effect, is_one_of, is_scalar, is_subgraph, sources

DEVICE, HOST = "device", "host"

_Item = TypeVar("_Item")
_Key = TypeVar("_Key")
_Side: TypeAlias = tuple[str, int]  # the space, and which of the parts that are kept apart


@dataclass
class Segment:
    """Nodes that run together, in graph order.

    Attributes:
        space: `device` or `host`.
        nodes: the nodes.
        name: `region0`, `region1`, ... or `host0`, `host1`, ...
    """

    space: str
    nodes: list[fx.Node]
    name: str = ""

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """Nodes outside the segment whose values it reads, in graph order."""
        own = set(self.nodes)
        used = {n for node in self.nodes for n in node.all_input_nodes}
        return tuple(sorted(n for n in used if n not in own and not is_subgraph(n)))

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """Nodes of the segment whose values, or sizes, somebody outside reads."""
        own = set(self.nodes)

        @functools.cache
        def is_read_outside(node: fx.Node) -> bool:
            return any(
                user not in own or (is_scalar(user) and is_read_outside(user))
                for user in node.users
            )

        return tuple(n for n in self.nodes if not is_scalar(n) and is_read_outside(n))


def grow_segments(
    nodes: Sequence[fx.Node], on_host: Collection[fx.Node], apart: Mapping[fx.Node, int]
) -> list[Segment]:
    """Group nodes into segments, in an order that may be run.

    Args:
        nodes: the nodes that compute, in graph order.
        on_host: those of them that run on the host.
        apart: nodes with different numbers are never in one segment.
    """
    space = {n: HOST if n in on_host else DEVICE for n in nodes}
    parents = _dependencies(nodes, space)
    side = {n: (space[n], apart.get(n, 0)) for n in nodes}
    levels = _levels(nodes, side, parents)
    groups: dict[tuple[int, _Side], list[fx.Node]] = defaultdict(list)
    for node in nodes:
        groups[levels[node], side[node]].append(node)
    components = [
        Segment(where, part)
        for (_, (where, _)), group in sorted(groups.items())
        for part in _connected(group, parents)
    ]
    return _merge_alike(components, side, levels, parents)


def _dependencies(
    nodes: Sequence[fx.Node], space: Mapping[fx.Node, str]
) -> dict[fx.Node, list[fx.Node]]:
    """Give the compute nodes each node waits for: by data, through scalars, or by side effect."""
    parents: dict[fx.Node, list[fx.Node]] = {}
    last_effect: fx.Node | None = None
    for node in nodes:
        found = dict.fromkeys(sources(node.all_input_nodes, space))
        if has_effect(node):
            if last_effect is not None:
                found[last_effect] = None
            last_effect = node
        parents[node] = list(found)
    return parents


def _levels(
    nodes: Sequence[fx.Node],
    side: Mapping[fx.Node, _Side],
    parents: Mapping[fx.Node, Sequence[fx.Node]],
) -> dict[fx.Node, int]:
    levels: dict[fx.Node, int] = {}
    children: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        levels[node] = max((levels[p] + (side[p] != side[node]) for p in parents[node]), default=0)
        for parent in parents[node]:
            children[parent].append(node)
    constant: set[fx.Node] = set()
    views: set[fx.Node] = set()  # of arguments
    for node in nodes:
        if side[node][0] != DEVICE:
            continue
        if constant.issuperset(node.all_input_nodes):
            constant.add(node)
        elif is_one_of(node, VIEW_OPS) and views.issuperset(parents[node]):
            views.add(node)
    for node in reversed(nodes):
        # What is made from nothing goes to where it is first needed. So does a view of an argument
        # that the device alone reads: alone on its level, the host would be asked to make it.
        is_moved = node in constant or (
            node in views and all(side[c][0] == DEVICE for c in children[node])
        )
        if is_moved and children[node]:
            levels[node] = min(levels[c] - (side[c] != side[node]) for c in children[node])
    return levels


def _connected(
    group: Sequence[fx.Node], parents: Mapping[fx.Node, Sequence[fx.Node]]
) -> list[list[fx.Node]]:
    """Split nodes into weakly connected components, each in graph order."""
    root = {n: n for n in group}

    def find(node: fx.Node) -> fx.Node:
        while root[node] is not node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    for node in group:
        for parent in parents[node]:
            if parent in root:
                root[find(node)] = find(parent)
    return list(_grouped(group, find).values())


def _merge_alike(
    segments: list[Segment],
    side: Mapping[fx.Node, _Side],
    levels: Mapping[fx.Node, int],
    parents: Mapping[fx.Node, Sequence[fx.Node]],
) -> list[Segment]:
    """Join segments of one level that wait for, and are waited for by, the same segments."""
    owner = {n: i for i, s in enumerate(segments) for n in s.nodes}
    before: list[set[int]] = [set() for _ in segments]
    after: list[set[int]] = [set() for _ in segments]
    order = sorted(range(len(segments)), key=lambda i: levels[segments[i].nodes[0]])
    direct: list[set[int]] = [set() for _ in segments]
    for node, i in owner.items():
        direct[i] |= {owner[p] for p in parents[node]} - {i}
    ordered = _topological(order, direct)
    for i in ordered:
        before[i] = set().union(direct[i], *(before[j] for j in direct[i]))
    for i in reversed(ordered):
        for j in direct[i]:
            after[j] |= {i} | after[i]

    def signature(i: int) -> object:
        first = segments[i].nodes[0]
        return side[first], levels[first], frozenset(before[i]), frozenset(after[i])

    position = {n: k for k, n in enumerate(parents)}
    return [
        Segment(
            segments[alike[0]].space,
            sorted((n for i in alike for n in segments[i].nodes), key=position.__getitem__),
        )
        for alike in _grouped(ordered, signature).values()
    ]


def _topological(order: Sequence[int], direct: Sequence[set[int]]) -> list[int]:
    done: dict[int, None] = {}

    def visit(i: int) -> None:
        if i not in done:
            for j in sorted(direct[i]):
                visit(j)
            done[i] = None

    for i in order:
        visit(i)
    return list(done)


def with_own_sizes(segment: Segment, scalars: Sequence[fx.Node]) -> Segment:
    """Let a segment compute the sizes of its own tensors: it cannot wait for itself."""
    if not scalars:
        return segment
    own, arithmetic = set(segment.nodes), set(scalars)
    needed: set[fx.Node] = set()
    stack = list(segment.nodes)
    while stack:
        fresh = arithmetic.intersection(stack.pop().all_input_nodes) - needed
        needed |= fresh
        stack += fresh
    for node in scalars:
        if node in needed and not own.isdisjoint(node.all_input_nodes):
            own.add(node)
    if len(own) == len(segment.nodes):
        return segment
    return Segment(segment.space, sorted(own))


def named(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Name segments by their space and order."""
    count = {DEVICE: itertools.count(), HOST: itertools.count()}
    stem = {DEVICE: "region", HOST: "host"}
    for segment in segments:
        segment.name = f"{stem[segment.space]}{next(count[segment.space])}"
    return tuple(segments)


def _grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    groups: dict[_Key, list[_Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups

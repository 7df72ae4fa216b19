"""Cut a captured graph into device regions and host segments; every host op says why it is one.

Nodes are put on levels: a node's level is one more than that of a predecessor in the other space,
and the same as that of one in its own space. Nodes of one level and space can therefore never
depend on each other through another segment (every segment is convex, and the segments have no
cycle). Within a level, what is not connected stays apart if it waits for, or is waited for by,
different segments, so that independent regions can overlap.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import fx

from lowering.capabilities import Capabilities, node_tensors
from lowering.capture import CapturedGraph
from lowering.decompositions import matches, op_name
from lowering.errors import HostOp
from lowering.source import user_line

DEVICE, HOST = "device", "host"

_Item = TypeVar("_Item")
_Key = TypeVar("_Key")

# Views and copies: a region of these alone computes nothing, so it is not worth a transfer.
MOVE_OPS = frozenset({"prims.collapse"}) | frozenset(
    f"aten.{name}"
    for name in (
        "alias alias_copy as_strided clone copy detach diagonal expand lift_fresh_copy permute "
        "select slice split split_with_sizes squeeze t transpose unbind unfold unsqueeze view "
        "view_as_complex view_as_real _reshape_alias _to_copy _unsafe_view"
    ).split()
)
# Made from nothing: alone they are not worth a region either.
FACTORY_OPS = frozenset(
    f"aten.{name}" for name in "arange empty eye full linspace ones scalar_tensor zeros".split()
)


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
        """Nodes outside the segment whose values it reads, in the order of first use."""
        own = set(self.nodes)
        used = itertools.chain.from_iterable(n.all_input_nodes for n in self.nodes)
        return tuple(dict.fromkeys(n for n in used if n not in own and not _is_subgraph(n)))

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """Nodes of the segment whose values somebody outside reads."""
        own = set(self.nodes)
        return tuple(
            n
            for n in self.nodes
            if not _is_number(n.meta.get("val")) and any(user not in own for user in n.users)
        )


@dataclass(frozen=True)
class Partition:
    """A captured graph, cut.

    Attributes:
        captured: the graph.
        segments: device regions and host segments, in an order that may be run.
        scalars: nodes of Python arithmetic on sizes, which need no device and no bytes.
        host_ops: why each host node is one.
    """

    captured: CapturedGraph
    segments: tuple[Segment, ...]
    scalars: tuple[fx.Node, ...]
    host_ops: Mapping[fx.Node, HostOp] = field(default_factory=dict)

    @property
    def regions(self) -> tuple[Segment, ...]:
        """The device regions."""
        return tuple(s for s in self.segments if s.space == DEVICE)


def is_scalar(node: fx.Node) -> bool:
    """Say whether a node is arithmetic on sizes: no tensor's bytes are read or written."""
    if node.op != "call_function" or not _is_number(node.meta.get("val")):
        return False
    if node.target in _SIZE_OPS:
        return True
    return all(_is_number(n.meta.get("val")) for n in node.all_input_nodes)


_SIZE_OPS = frozenset(
    {
        torch.ops.aten.sym_size.int,
        torch.ops.aten.sym_numel.default,
    }
)


def partition(
    captured: CapturedGraph,
    capabilities: Capabilities,
    *,
    disabled_ops: Iterable[str] = (),
    failed: Mapping[fx.Node, str] | None = None,
) -> Partition:
    """Cut a graph into convex device regions and host segments.

    Args:
        captured: the graph.
        capabilities: what the target runs.
        disabled_ops: ops that the user sends to the host.
        failed: nodes that the compiler has refused before, and why.
    """
    disabled = frozenset(disabled_ops)
    nodes = captured.nodes
    scalars = tuple(n for n in nodes if is_scalar(n))
    compute = [n for n in nodes if n not in set(scalars)]
    host_ops: dict[fx.Node, HostOp] = {}
    for node in compute:
        if host_op := _why_host(node, capabilities, disabled, failed or {}):
            host_ops[node] = host_op
    for node in compute:  # the results of a multi-output op are taken apart where it runs
        if node.target is operator.getitem and node.args[0] in host_ops:
            host_ops[node] = host_ops[node.args[0]]  # type: ignore[index]
    while True:
        segments = _segments(compute, host_ops)
        idle = [s for s in segments if s.space == DEVICE and not _computes(s)]
        if not idle:
            segments = [_with_own_sizes(s, scalars) for s in segments]
            return Partition(captured, _named(segments), scalars, host_ops)
        for node in itertools.chain.from_iterable(s.nodes for s in idle):
            host_ops[node] = _host_op(node, "cost", "moves data only, which is not worth a transfer")


def _why_host(
    node: fx.Node,
    capabilities: Capabilities,
    disabled: frozenset[str],
    failed: Mapping[fx.Node, str],
) -> HostOp | None:
    name = op_name(node.target)
    if node.target is operator.getitem:
        return None
    if node in failed:
        return _host_op(node, "failed", failed[node])
    if matches(name, disabled):
        return _host_op(node, "disabled", "sent to the host by the option disabled_ops")
    if _draws_random_numbers(node):
        reason = "draws from PyTorch's random generator, whose state is on the host"
        return _host_op(node, "state", reason)
    if not isinstance(node.target, torch._ops.OpOverload):
        return _host_op(node, "unsupported", "no ATen op, so only PyTorch itself can run it")
    if reason := capabilities.why_not(name, node_tensors(node)):
        return _host_op(node, "unsupported", reason)
    return None


def _segments(nodes: Sequence[fx.Node], host_ops: Mapping[fx.Node, HostOp]) -> list[Segment]:
    space = {n: HOST if n in host_ops else DEVICE for n in nodes}
    parents = _dependencies(nodes, space)
    levels = _levels(nodes, space, parents)
    groups: dict[tuple[int, str], list[fx.Node]] = defaultdict(list)
    for node in nodes:
        groups[levels[node], space[node]].append(node)
    components = [
        Segment(where, part)
        for (_, where), group in sorted(groups.items())
        for part in _connected(group, parents)
    ]
    return _merge_alike(components, levels, parents)


def _dependencies(
    nodes: Sequence[fx.Node], space: Mapping[fx.Node, str]
) -> dict[fx.Node, list[fx.Node]]:
    """Give the compute nodes each node waits for: by data, through scalars, or by side effect."""
    parents: dict[fx.Node, list[fx.Node]] = {}
    last_effect: fx.Node | None = None
    for node in nodes:
        found: dict[fx.Node, None] = {}
        stack = list(node.all_input_nodes)
        while stack:
            parent = stack.pop()
            if parent in space:
                found[parent] = None
            elif parent.op == "call_function":
                stack += parent.all_input_nodes
        if _draws_random_numbers(node) or node.is_impure():
            if last_effect is not None:
                found[last_effect] = None
            last_effect = node
        parents[node] = list(found)
    return parents


def _levels(
    nodes: Sequence[fx.Node],
    space: Mapping[fx.Node, str],
    parents: Mapping[fx.Node, Sequence[fx.Node]],
) -> dict[fx.Node, int]:
    levels: dict[fx.Node, int] = {}
    children: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        levels[node] = max(
            (levels[p] + (space[p] != space[node]) for p in parents[node]), default=0
        )
        for parent in parents[node]:
            children[parent].append(node)
    constant: set[fx.Node] = set()
    for node in nodes:
        if constant.issuperset(node.all_input_nodes) and space[node] == DEVICE:
            constant.add(node)
    for node in reversed(nodes):  # what is made from nothing goes to where it is first needed
        if node in constant and children[node]:
            levels[node] = min(levels[c] - (space[c] != space[node]) for c in children[node])
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
        segment = segments[i]
        level = levels[segment.nodes[0]]
        return segment.space, level, frozenset(before[i]), frozenset(after[i])

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


def _with_own_sizes(segment: Segment, scalars: Sequence[fx.Node]) -> Segment:
    """Let a segment compute the sizes of its own tensors: it cannot wait for itself."""
    if segment.space != DEVICE or not scalars:
        return segment
    own = set(segment.nodes)
    for node in scalars:
        if not own.isdisjoint(node.all_input_nodes):
            own.add(node)
    if len(own) == len(segment.nodes):
        return segment
    return Segment(segment.space, [n for n in segment.nodes[0].graph.nodes if n in own])


def _named(segments: Sequence[Segment]) -> tuple[Segment, ...]:
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


def _host_op(node: fx.Node, kind: str, reason: str) -> HostOp:
    line = user_line(node)
    name = op_name(node.target)
    if name == "with_effects":  # (token, op, ...): an op whose side effects PyTorch keeps in order
        name, reason = op_name(node.args[1]), "has a side effect, which only the host can have"
    return HostOp(name, kind, reason, line.where, line.code)


def _computes(segment: Segment) -> bool:
    return any(
        not _is_one_of(n, MOVE_OPS | FACTORY_OPS) and n.target is not operator.getitem
        for n in segment.nodes
    )


def _is_one_of(node: fx.Node, packets: frozenset[str]) -> bool:
    return op_name(node.target).rpartition(".")[0] in packets


def _draws_random_numbers(node: fx.Node) -> bool:
    target = node.target
    seeded = torch.Tag.nondeterministic_seeded
    return isinstance(target, torch._ops.OpOverload) and seeded in target.tags


def _is_subgraph(node: fx.Node) -> bool:
    return node.op == "get_attr" and "val" not in node.meta


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))

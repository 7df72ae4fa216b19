"""The schedule of one graph: put, invoke, gather, host, scalar, write and free steps, as data.

A plan names values, not buffers: `relu` on the host and `relu` on the device are two places of one
value. Device work is listed as early as its inputs allow, so that everything up to a host segment
has been submitted when the plan first waits; each value crosses each way at most once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from lowering.errors import HostOp, InternalError
from lowering.nodes import sources
from lowering.partition import Partition
from lowering.region import Region
from lowering.segments import DEVICE, HOST, Segment


@dataclass(frozen=True)
class Put:
    """Give the device host values. Never waits for the device."""

    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"put     {_names(self.values)}"


@dataclass(frozen=True)
class Invoke:
    """Submit a region; its results are handles at once."""

    region: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"invoke  {_names(self.outputs)} = {self.region}({_names(self.inputs)})"


@dataclass(frozen=True)
class Gather:
    """Bring device values to the host in one batch, behind one wait."""

    values: tuple[str, ...]
    reader: str

    def __str__(self) -> str:
        return f"gather  {_names(self.values)} for {self.reader}"


@dataclass(frozen=True)
class Host:
    """Run a host segment with PyTorch's CPU kernels."""

    segment: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"host    {_names(self.outputs)} = {self.segment}({_names(self.inputs)})"


@dataclass(frozen=True)
class Scalar:
    """Compute a number from sizes and numbers; sizes of handles are known without waiting."""

    output: str
    inputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"scalar  {self.output} from {_names(self.inputs)}"


@dataclass(frozen=True)
class Write:
    """Write values to arguments of the call, where the device has not done so in place."""

    inputs: tuple[str, ...]
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"write   {_names(self.values)} to {_names(self.inputs)}"


@dataclass(frozen=True)
class Free:
    """Drop values after their last use."""

    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"free    {_names(self.values)}"


Step = Put | Invoke | Gather | Host | Scalar | Write | Free


@dataclass(frozen=True)
class Plan:
    """A schedule that can be run and that prints itself.

    Attributes:
        inputs: names of the call's arguments, in order.
        outputs: what the call returns: a value's name, or a constant (None, a number).
        steps: what to do, in order.
        regions: the device regions, by name.
        host_segments: the nodes of the host segments, by name.
        scalars: the nodes of the scalar steps, by name.
        constants: names of tensors that the graph holds itself and host segments read.
        host_ops: every op that runs on the host, with its reason.
        edges: the nodes of the inputs and results that are handles at the edge of the call.
        kept: names of the results that stay on the device.
    """

    inputs: tuple[str, ...]
    outputs: tuple[object, ...]
    steps: tuple[Step, ...]
    regions: dict[str, Region]
    host_segments: dict[str, Segment]
    scalars: dict[str, fx.Node]
    constants: dict[str, fx.Node]
    host_ops: tuple[HostOp, ...]
    edges: tuple[fx.Node, ...] = ()
    kept: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """The names of all values, those of the inputs first."""
        mentioned = (name for step in self.steps for name in _mentioned(step))
        return list(dict.fromkeys((*self.inputs, *self.constants, *mentioned)))

    def __str__(self) -> str:
        outputs = _names(o.name if isinstance(o, Value) else repr(o) for o in self.outputs)
        return "\n".join([*map(str, self.steps), f"return  {outputs}"])


@dataclass(frozen=True)
class Value:
    """A result of the plan that is a value (and not a constant), by its name."""

    name: str


def build_plan(partition: Partition, regions: Sequence[Region]) -> Plan:
    """Schedule a partition.

    Args:
        partition: the cut graph.
        regions: its device segments, extracted, in the same order.
    """
    return _Scheduler(partition, regions).plan()


class _Scheduler:
    """Lists the steps of one partition; `_on_host` and `_on_device` say which values are where."""

    def __init__(self, partition: Partition, regions: Sequence[Region]) -> None:
        self._partition = partition
        self._regions = {region.name: region for region in regions}
        self._scalars = set(partition.scalars)
        captured = partition.captured
        self._on_host = {*captured.inputs, *captured.constants} - captured.handles
        self._on_device: set[fx.Node] = set(captured.handles)
        self._steps: list[Step] = []

    def plan(self) -> Plan:
        """Build the plan."""
        captured = self._partition.captured
        for segment in self._in_order():
            self._schedule(segment)
        returned = [o for o in captured.outputs if isinstance(o, fx.Node)]
        for node in returned:
            self._need_scalar(node)
        stay = captured.kept & self._on_device
        self._gather([n for n in returned if n not in stay], "the caller")
        if captured.writes:
            inputs, values = zip(*captured.writes, strict=True)
            self._steps.append(Write(_node_names(inputs), _node_names(values)))
        outputs = tuple(Value(o.name) if isinstance(o, fx.Node) else o for o in captured.results)
        return Plan(
            inputs=tuple(n.name for n in captured.inputs),
            outputs=outputs,
            steps=_with_frees(self._steps, {n.name for n in returned}),
            regions=self._regions,
            host_segments={s.name: s for s in self._partition.segments if s.space != DEVICE},
            scalars={n.name: n for n in self._partition.scalars},
            constants={n.name: n for n in captured.constants},
            # the parts of a result that are taken apart on the host share its reason
            host_ops=tuple({id(op): op for op in self._partition.host_ops.values()}.values()),
            edges=(*captured.handles, *captured.kept),
            kept=frozenset(n.name for n in captured.kept),
        )

    def _in_order(self) -> Iterator[Segment]:
        """Give the segments in the order in which they run: those of the device that can, first.

        Only when no region can be submitted any more may the plan wait.
        """
        segments, scalars = self._partition.segments, self._scalars
        makers = {n: i for i, s in enumerate(segments) for n in s.nodes if n not in scalars}
        awaited = [{makers[n] for n in sources(s.inputs, makers)} for s in segments]
        followers: list[list[int]] = [[] for _ in segments]
        for i, before in enumerate(awaited):
            for j in before:
                followers[j].append(i)
        ready: dict[str, list[int]] = {DEVICE: [], HOST: []}
        fresh = [i for i, before in enumerate(awaited) if not before]
        for _ in segments:
            for i in fresh:
                heapq.heappush(ready[segments[i].space], i)
            if not any(ready.values()):
                waiting = [s.name for s, before in zip(segments, awaited, strict=True) if before]
                raise InternalError(f"segments wait for each other: {waiting}")
            done = heapq.heappop(ready[DEVICE] or ready[HOST])
            yield segments[done]
            for i in followers[done]:
                awaited[i].remove(done)
            fresh = [i for i in followers[done] if not awaited[i]]

    def _schedule(self, segment: Segment) -> None:
        if segment.space == DEVICE:
            self._invoke(self._regions[segment.name])
        else:
            self._run_on_host(segment)

    def _invoke(self, region: Region) -> None:
        for node in region.inputs:
            self._need_scalar(node)
        missing = [n for n in region.inputs if n not in self._on_device and _is_tensor(n)]
        if missing:
            self._steps.append(Put(tuple(n.name for n in missing)))
            self._on_device.update(missing)
        inputs, outputs = _node_names(region.inputs), _node_names(region.outputs)
        self._steps.append(Invoke(region.name, inputs, outputs))
        self._on_device.update(region.outputs)

    def _run_on_host(self, segment: Segment) -> None:
        for node in segment.inputs:
            self._need_scalar(node)
        self._gather(segment.inputs, segment.name)
        inputs, outputs = _node_names(segment.inputs), _node_names(segment.outputs)
        self._steps.append(Host(segment.name, inputs, outputs))
        self._on_host.update(segment.outputs)

    def _gather(self, nodes: Sequence[fx.Node], reader: str) -> None:
        missing = tuple(dict.fromkeys(n for n in nodes if n not in self._on_host))
        if missing:
            self._steps.append(Gather(_node_names(missing), reader))
            self._on_host.update(missing)

    def _need_scalar(self, node: fx.Node) -> None:
        if node not in self._scalars or node in self._on_host:
            return
        for parent in node.all_input_nodes:
            self._need_scalar(parent)
        self._steps.append(Scalar(node.name, _node_names(node.all_input_nodes)))
        self._on_host.add(node)


def _with_frees(steps: Sequence[Step], kept: set[str]) -> tuple[Step, ...]:
    """Add a `Free` after the last step that reads a value which a step made."""
    out: list[Step] = []
    seen = set(kept)
    for step in reversed(steps):
        names = _mentioned(step)
        dead = tuple(dict.fromkeys(n for n in names if n not in seen))
        seen.update(dead)
        if dead and step is not steps[-1]:
            out.append(Free(dead))
        out.append(step)
    return tuple(reversed(out))


def _mentioned(step: Step) -> tuple[str, ...]:
    match step:
        case Put(values) | Gather(values):
            return values
        case Invoke(_, inputs, outputs) | Host(_, inputs, outputs):
            return (*inputs, *outputs)
        case Scalar(output, inputs):
            return (*inputs, output)
        case Write(inputs, values):
            return (*inputs, *values)
        case Free(values):
            return values


def _is_tensor(node: fx.Node) -> bool:
    return hasattr(node.meta.get("val"), "shape")


def _node_names(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(n.name for n in nodes)


def _names(values: Sequence[str] | object) -> str:
    return ", ".join(values)  # type: ignore[arg-type]

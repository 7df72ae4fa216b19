"""Cut a captured graph into device regions and host segments; every host op says why it is one."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from lowering.capabilities import Capabilities, tensors_of
from lowering.capture import CapturedGraph
from lowering.errors import HostOp
from lowering.kernel_calls import why_no_kernel
from lowering.kernels import Kernel
from lowering.nodes import (
    FACTORY_OPS,
    MOVE_OPS,
    STORAGE_OPS,
    draws_random_numbers,
    is_one_of,
    is_scalar,
    makes_sizes,
    view_chain,
    view_root,
)
from lowering.op_names import matches, op_name
from lowering.segments import DEVICE, Segment, grow_segments, named, with_own_sizes
from lowering.source import user_line
from lowering.unfit import masks_of, why_refused

DRAWS_RANDOM_NUMBERS = "draws from PyTorch's random generator, whose state is on the host"
_MASKED = (
    "the target does not run it with an index of truths, which says where, not at which places"
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


def partition(
    captured: CapturedGraph,
    capabilities: Capabilities,
    *,
    disabled_ops: Iterable[str] = (),
    failed: Mapping[fx.Node, str] | None = None,
    apart: Mapping[fx.Node, int] | None = None,
    kernels: Mapping[str, Kernel] | None = None,
) -> Partition:
    """Cut a graph into convex device regions and host segments.

    Args:
        captured: the graph.
        capabilities: what the target runs.
        disabled_ops: ops that the user sends to the host.
        failed: nodes that the compiler has refused before, and why.
        apart: nodes that it has refused together: those with different numbers get regions of
            their own.
        kernels: what custom ops are on the device.
    """
    scalars = tuple(n for n in captured.nodes if is_scalar(n))
    compute = [n for n in captured.nodes if not is_scalar(n)]
    host_ops = why_host(
        compute, capabilities, disabled_ops=disabled_ops, failed=failed, kernels=kernels
    )
    for node in _views_between_results(captured):
        if node not in host_ops:
            host_ops[node] = _host_op(node, "cost", "a view of a result, made where the result is")
    _take_along(compute, host_ops)
    while True:
        segments = grow_segments(compute, host_ops, apart or {})
        idle = [s for s in segments if s.space == DEVICE and not _computes(s)]
        blind = [s for s in segments if s.space == DEVICE and not s.outputs]
        if not idle and not blind:
            segments = [with_own_sizes(s, scalars) for s in segments]
            return Partition(captured, named(segments), scalars, host_ops)
        for node in itertools.chain.from_iterable(s.nodes for s in idle):
            host_ops[node] = _host_op(
                node, "cost", "moves data only, which is not worth a transfer"
            )
        for node in (s.nodes[-1] for s in blind):
            host_ops[node] = _host_op(node, "cost", "nobody waits for what comes of it")


def why_host(
    nodes: Iterable[fx.Node],
    capabilities: Capabilities,
    *,
    disabled_ops: Iterable[str] = (),
    failed: Mapping[fx.Node, str] | None = None,
    kernels: Mapping[str, Kernel] | None = None,
) -> dict[fx.Node, HostOp]:
    """Give the nodes that cannot, or shall not, run on the device, each with its reason.

    Args:
        nodes: nodes that compute tensors.
        capabilities, disabled_ops, failed, kernels: as for `partition`.
    """
    disabled = frozenset(disabled_ops)
    found = {n: _why_host(n, capabilities, disabled, failed or {}, kernels or {}) for n in nodes}
    return {node: host_op for node, host_op in found.items() if host_op is not None}


def _views_between_results(captured: CapturedGraph) -> list[fx.Node]:
    """Give the views that make one result share memory with another or an input, as eager's do.

    So do the elements of one that repeats them (`expand`). Only views that lead to nothing but
    results: what else reads one has it on the device.
    """
    results = {o for o in captured.results if isinstance(o, fx.Node)}
    results -= captured.kept  # handles share no memory that anybody writes to
    shared = Counter(view_root(node) for node in results)
    found: dict[fx.Node, None] = {}
    for node in reversed(captured.nodes):
        root = view_root(node)
        if root is node or root in captured.written:
            continue
        if shared[root] < 2 and root not in captured.inputs and not _repeats(node):
            continue
        if all(user.op == "output" or user in found for user in node.users):
            found[node] = None
    # What is split off is taken apart where it is split.
    return [n for n in found if n.target is not operator.getitem or n.args[0] in found]


def _repeats(node: fx.Node) -> bool:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return False  # several views
    pairs = zip(value.shape, value.stride(), strict=True)
    return any(isinstance(step, int) and step == 0 and str(size) != "1" for size, step in pairs)


def _take_along(nodes: Sequence[fx.Node], host_ops: dict[fx.Node, HostOp]) -> None:
    """Send to the host, too, what belongs to an op that runs there."""
    for node in [n for n in nodes if n in host_ops and is_one_of(n, STORAGE_OPS)]:
        for view in _views_to(node):  # or the host would have their elements in other memory
            host_ops.setdefault(view, _host_op(view, "cost", "a view that the host reads by"))
    for node in nodes:
        if node.target is operator.getitem and node.args[0] in host_ops:
            # the results of a multi-output op are taken apart where it runs
            host_ops[node] = host_ops[node.args[0]]  # type: ignore[index]
    for node in reversed(nodes):  # what is made from nothing for the host is made there
        if is_one_of(node, FACTORY_OPS) and node.users and host_ops.keys() >= node.users.keys():
            host_ops[node] = _host_op(node, "cost", "made from nothing, for the host")


def _views_to(node: fx.Node) -> list[fx.Node]:
    """Return the views that lead to what a node of `STORAGE_OPS` reads."""
    base = node.args[0]
    assert isinstance(base, fx.Node)
    return view_chain(base)[:-1]


def _why_host(
    node: fx.Node,
    capabilities: Capabilities,
    disabled: frozenset[str],
    failed: Mapping[fx.Node, str],
    kernels: Mapping[str, Kernel],
) -> HostOp | None:
    name = op_name(node.target)
    if node.target is operator.getitem:
        return None
    if node in failed:
        return _host_op(node, "failed", failed[node])
    if matches(name, disabled):
        return _host_op(node, "disabled", "sent to the host by the option disabled_ops")
    if draws_random_numbers(node):
        return _host_op(node, "state", DRAWS_RANDOM_NUMBERS)
    if not isinstance(node.target, torch._ops.OpOverload):
        return _host_op(node, "unsupported", "no ATen op, so only PyTorch itself can run it")
    if is_one_of(node, STORAGE_OPS) and _reads_argument(node):
        return _host_op(node, "state", "depends on where in memory an argument of the call lies")
    if makes_sizes(node):
        return _host_op(node, "unsupported", "the sizes of its result depend on data")
    if name in kernels:
        why_not = why_no_kernel(node, kernels[name])
        return _host_op(node, "unsupported", why_not) if why_not else None
    if node.target.namespace not in ("aten", "prims") and name not in capabilities.ops:
        return _host_op(node, "unsupported", "a custom op without a kernel (register_kernel)")
    why_not = why_refused(node) or _why_not(name, node, capabilities)
    return _host_op(node, "unsupported", why_not) if why_not else None


def _why_not(name: str, node: fx.Node, capabilities: Capabilities) -> str | None:
    inputs, results = tensors_of(node.all_input_nodes), tensors_of([node])
    why_not = capabilities.why_not(name, inputs, results)
    masks = set(map(id, masks_of(node))) if why_not else ()
    if masks:
        others = [t for t in inputs if id(t) not in masks]
        return capabilities.why_not(name, others, results) or _MASKED
    return why_not


def _reads_argument(node: fx.Node) -> bool:
    base = node.args[0]
    return isinstance(base, fx.Node) and view_root(base).op == "placeholder"


def _host_op(node: fx.Node, kind: str, reason: str) -> HostOp:
    line = user_line(node)
    name = op_name(node.target)
    if name == "with_effects":  # (token, op, ...): an op whose side effects PyTorch keeps in order
        name, reason = op_name(node.args[1]), "has a side effect, which only the host can have"
    return HostOp(name, kind, reason, line.where, line.code)


def _computes(segment: Segment) -> bool:
    return any(
        not is_one_of(n, MOVE_OPS | FACTORY_OPS) and n.target is not operator.getitem
        for n in segment.nodes
    )

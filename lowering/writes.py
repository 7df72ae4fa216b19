"""Which arguments a region may overwrite: those that its call writes to anyway, or takes over."""

from __future__ import annotations

from torch import fx

from lowering.nodes import (
    FACTORY_OPS,
    MOVE_OPS,
    VIEW_OPS,
    draws_random_numbers,
    is_one_of,
    sources,
    view_root,
)
from lowering.partition import Partition
from lowering.segments import DEVICE, Segment

_SAFE_OPS = MOVE_OPS | FACTORY_OPS  # on the host, they do not fail
# Their result is their first argument with some elements replaced: made in place, if that is given.
_UPDATES = frozenset(
    [
        "aten._unsafe_index_put",
        "aten.index_put",
        "aten.scatter",
        "aten.scatter_add",
        "aten.scatter_reduce",
        "aten.select_scatter",
        "aten.slice_scatter",
    ]
)


def given_inputs(parts: Partition) -> dict[str, frozenset[fx.Node]]:
    """Find the inputs whose memory a region may use as it likes, e.g. for their new values.

    The cache of a language model is one: a step writes a row of it in place, where otherwise it
    would copy the whole cache, and the caller would copy it back. It is given away if nobody else
    reads the old value, and nobody else could see the new one in that memory:

    - the new value is made in the region, and no other segment reads the input;
    - neither a result nor a host segment, which may return what it reads, has the new value;
    - no op of the user's before the write, such as the inverse of a matrix, can still fail on the
      host when the region runs: eager would not have written then.

    What a call takes over is another: nobody reads it afterwards, whatever becomes of the call. It
    is given away to its only reader if some of it is replaced there, which IREE does in place, and
    there is no host segment, which may keep what it reads.

    Returns:
        The inputs that each region is given, by its name.
    """
    captured = parts.captured
    makers = {node: segment for segment in parts.segments for node in segment.nodes}
    returned = {view_root(o) for o in captured.results if isinstance(o, fx.Node)}
    seen = returned | _read_by_host(makers)
    values = {value for _, value in captured.writes}
    awaited = {s.name: _before(s, makers) for s in parts.regions if values.intersection(s.nodes)}
    found: dict[str, set[fx.Node]] = {segment.name: set() for segment in parts.regions}
    for node, value in captured.writes:
        maker = makers.get(value)
        if maker is None or maker.space != DEVICE or node in values:
            continue
        if view_root(value) in seen or _may_fail_first(value, awaited[maker.name], parts):
            continue
        if all(makers.get(user, maker) is maker for user in node.users):
            found[maker.name].add(node)
    is_all_device = all(segment.space == DEVICE for segment in parts.segments)
    for node in captured.donated - returned if is_all_device else ():
        readers = {makers[user].name for user in node.users if user in makers}
        if len(readers) == 1 and readers <= found.keys() and _is_updated(node):
            found[readers.pop()].add(node)
    return {name: frozenset(nodes) for name, nodes in found.items()}


def _is_updated(node: fx.Node) -> bool:
    """Say whether some of a value is replaced, or of a view of it."""
    return any(
        is_one_of(user, _UPDATES) or (is_one_of(user, VIEW_OPS) and _is_updated(user))
        for user in node.users
        if user.args and user.args[0] is node
    )


def _read_by_host(makers: dict[fx.Node, Segment]) -> set[fx.Node]:
    """Find the values that the host reads, or of which it reads a view."""
    return {
        view_root(node)
        for node in makers
        if any(user in makers and makers[user].space != DEVICE for user in node.users)
    }


def _may_fail_first(value: fx.Node, awaited: set[str], parts: Partition) -> bool:
    """Say whether the host computes what comes before a value when its region may have ended.

    Args:
        value: that is written.
        awaited: the segments that its region waits for.
        parts: of the graph.
    """
    return any(
        node < value and not (is_one_of(node, _SAFE_OPS) or draws_random_numbers(node))
        for segment in parts.segments
        if segment.space != DEVICE and segment.name not in awaited
        for node in segment.nodes
    )


def _before(segment: Segment, makers: dict[fx.Node, Segment]) -> set[str]:
    """Name the segments that a segment waits for."""
    found: set[str] = set()
    stack = [segment]
    while stack:
        new = {makers[n].name: makers[n] for n in sources(stack.pop().inputs, makers)}
        stack += [maker for name, maker in new.items() if name not in found]
        found |= new.keys()
    return found

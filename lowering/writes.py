"""Which arguments a region may overwrite: those that its call ends up writing to anyway."""

from __future__ import annotations

from torch import fx

from lowering.nodes import view_root
from lowering.partition import Partition
from lowering.segments import DEVICE, Segment


def given_inputs(parts: Partition) -> dict[str, frozenset[fx.Node]]:
    """Find the inputs whose memory a region may use as it likes, e.g. for their new values.

    The cache of a language model is one: a step writes a row of it in place, where otherwise it
    would copy the whole cache, and the caller would copy it back. It is given away if nobody else
    reads the old value, and nobody else could see the new one in that memory:

    - the new value is made in the region, and no other segment reads the input;
    - neither a result nor a host segment, which may return what it reads, has the new value.

    Returns:
        The inputs that each region is given, by its name.
    """
    captured = parts.captured
    makers = {node: segment for segment in parts.segments for node in segment.nodes}
    returned = {view_root(o) for o in captured.results if isinstance(o, fx.Node)}
    values = [value for _, value in captured.writes]
    found: dict[str, set[fx.Node]] = {segment.name: set() for segment in parts.regions}
    for node, value in captured.writes:
        maker = makers.get(value)
        if maker is None or maker.space != DEVICE or node in values:
            continue
        is_private = view_root(value) not in returned and not _reaches_host(value, makers)
        if is_private and all(makers.get(user, maker) is maker for user in node.users):
            found[maker.name].add(node)
    return {name: frozenset(nodes) for name, nodes in found.items()}


def _reaches_host(value: fx.Node, makers: dict[fx.Node, Segment]) -> bool:
    """Say whether the host reads a value, or a view of it."""
    root = view_root(value)
    return any(
        view_root(node) is root and makers[user].space != DEVICE
        for node in makers
        for user in node.users
        if user in makers
    )

"""Graph modules: their Python code is written when somebody runs or reads it; as bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx._lazy_graph_module import _LazyGraphModule

_SAVED = frozenset({"val", "stack_trace"})  # of what a node tells of itself


def graph_module_of(owner: fx.GraphModule | None, graph: fx.Graph) -> fx.GraphModule:
    """Make a graph module; writing its code would be a fifth of the time that a plan takes.

    Args:
        owner: holds what the graph's `get_attr` nodes name.
        graph: the graph.
    """
    return _LazyGraphModule(owner if owner is not None else {}, graph)


def with_code(graph_module: fx.GraphModule) -> Callable[..., Any]:
    """Write the code of a graph module whose graph has changed; returns what runs it."""
    graph_module.recompile()
    _LazyGraphModule.force_recompile(graph_module)
    forward: Callable[..., Any] = graph_module.forward
    return forward


def graph_bytes(graph_module: fx.GraphModule) -> bytes:
    """Pickle a graph, its fake values and the user's lines.

    Raises:
        Exception: whatever the objects in it raise.
    """
    options = Options(ops_filter=None, node_metadata_key_filter=_SAVED.__contains__)
    with unset_fake_temporarily():
        return zlib.compress(GraphPickler.dumps(graph_module, options), level=1)


def graph_from_bytes(data: bytes, fake_mode: FakeTensorMode) -> fx.GraphModule:
    """Read what `graph_bytes` has written; it is run, and must be from whom one trusts.

    Args:
        data: the bytes.
        fake_mode: of which the graph's fake values are to be.
    """
    loaded: Any = GraphPickler.loads(zlib.decompress(data), fake_mode)
    assert isinstance(loaded, fx.GraphModule)
    return loaded

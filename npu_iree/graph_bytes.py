"""A graph as bytes, for another process: with its fake values and the user's lines."""

from __future__ import annotations

import zlib
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx._graph_pickler import GraphPickler, Options

_SAVED = frozenset({"val", "stack_trace"})  # of what a node tells of itself


def graph_bytes(graph_module: fx.GraphModule) -> bytes:
    """Pickle a graph.

    Raises:
        Exception: whatever the objects in it raise.
    """
    options = Options(ops_filter=None, node_metadata_key_filter=_SAVED.__contains__)
    with unset_fake_temporarily():
        return zlib.compress(GraphPickler.dumps(graph_module, options), level=1)


def graph_from_bytes(data: bytes, fake_mode: FakeTensorMode) -> fx.GraphModule:
    """Read what `graph_bytes` has written; reading runs code, so it must be of whom one trusts.

    Args:
        data: the bytes.
        fake_mode: of which the graph's fake values are to be.
    """
    loaded: Any = GraphPickler.loads(zlib.decompress(data), fake_mode)
    assert isinstance(loaded, fx.GraphModule)
    return loaded

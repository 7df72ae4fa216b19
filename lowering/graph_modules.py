"""Graph modules whose Python code is written when somebody runs or reads it: most never are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule


def graph_module_of(
    owner: fx.GraphModule | dict[str, Any] | None, graph: fx.Graph
) -> fx.GraphModule:
    """Make a graph module; writing its code would be a fifth of the time that a plan takes.

    Args:
        owner: holds what the graph's `get_attr` nodes name; or that itself, by these names.
        graph: the graph.
    """
    return _LazyGraphModule(owner if owner is not None else {}, graph)


def with_code(graph_module: fx.GraphModule) -> Callable[..., Any]:
    """Write the code of a graph module whose graph has changed; returns what runs it."""
    graph_module.recompile()
    _LazyGraphModule.force_recompile(graph_module)
    forward: Callable[..., Any] = graph_module.forward
    return forward

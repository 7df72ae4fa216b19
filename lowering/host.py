"""A host segment as a callable: its ATen nodes in a graph module of their own."""

from __future__ import annotations

import copy

from torch import fx

from lowering.segments import Segment


def extract_host(segment: Segment) -> fx.GraphModule:
    """Copy a host segment into a module that maps its inputs to a tuple of its outputs.

    Args:
        segment: nodes that run as PyTorch CPU kernels.
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {n: graph.placeholder(n.name) for n in segment.inputs}
    for node in segment.nodes:
        for source in node.all_input_nodes:
            if source not in values:  # the body of a higher-order op, e.g. a branch of torch.cond
                values[source] = graph.node_copy(source)
        values[node] = graph.node_copy(node, lambda n: values[n])
        values[node].meta = copy.copy(node.meta)
    graph.output(tuple(values[n] for n in segment.outputs))
    owner = segment.nodes[0].graph.owning_module
    return fx.GraphModule(owner if owner is not None else {}, graph)

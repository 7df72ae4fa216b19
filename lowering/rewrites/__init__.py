"""Rewrites of a region's graph for a target: the same values, in a form that it computes faster.

Unlike decompositions, they come last: what runs on the device is decided, an op on the host stays
whole, and a region that the cache has is not rewritten again.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from lowering.cpu import compiling_for
from lowering.graph_modules import graph_module_of
from lowering.importable import make_importable
from lowering.rewrites import (
    broadcasts,
    convolution_gradients,
    products,
    sums,
    transposed_convolutions,
)
from lowering.rewrites.channels_last import ChannelsLast
from lowering.rewrites.forms import Forms
from lowering.rewrites.matrices import Matrices
from lowering.rewrites.recorder import Recorder
from lowering.rewrites.rule import Rule
from lowering.target import CompileTarget

# What a target lists in `CompileTarget.rewrites` -> op -> what it is rewritten by.
RULES: Mapping[str, Mapping[Any, Rule]] = {
    "broadcasts": broadcasts.RULES,
    "convolutions": {**transposed_convolutions.RULES, **convolution_gradients.RULES},
    "products": products.RULES,
    "sums": sums.RULES,
}
# The same -> the form in which values are computed where that can be, after that.
FORMS: Mapping[str, type[Forms]] = {
    "channels_last": ChannelsLast,
    "matrices": Matrices,
}
_ONE_AT_A_TIME = threading.Lock()


def rewrite(graph_module: fx.GraphModule, target: CompileTarget) -> fx.GraphModule:
    """Rewrite ops as a target wants them: those of static sizes, and convolutions of any.

    Before: %y = convolution(%x, %w, None, ...)            with %x of [N, C, L], %w of [C, 1, 2]
    After:  %1 = mul(slice(%x, 2, 0, L - 1), select(%w, 2, 0))
            %2 = mul(slice(%x, 2, 1, L), select(%w, 2, 1)); %y = add(%1, %2)

    Args:
        graph_module: of a region; every node carries its fake tensor.
        target: whose `rewrites` are made.

    Returns:
        A new graph, or the same one if there is nothing to rewrite.
    """
    given = graph_module
    flags = target.flag_sets[0] if target.flag_sets else ()
    with _ONE_AT_A_TIME, compiling_for(flags):
        graph_module = _by_rules(graph_module, target)
        for form in (FORMS[name] for name in target.rewrites if name not in RULES):
            graph_module = form(target.keep_ops).rewrite(graph_module)
        if graph_module is not given:
            make_importable(graph_module.graph)  # views of sizes that are not known
    return graph_module


def _by_rules(graph_module: fx.GraphModule, target: CompileTarget) -> fx.GraphModule:
    rules = [RULES[name] for name in target.rewrites if name in RULES]
    table = {op: rule for of_kind in rules for op, rule in of_kind.items()}
    graph, values = fx.Graph(), dict[fx.Node, Any]()
    recorder, is_rewritten = Recorder(graph, target.keep_ops), False
    for node in graph_module.graph.nodes:
        new: Any = NotImplemented
        rule = table.get(node.target)
        if rule is not None and rule.is_for(node) and (taken := rule.takes(node)) is not None:
            args = fx.map_arg(taken, values.__getitem__)
            new = recorder.record(rule.function, args, node.meta)
        if new is not NotImplemented:
            is_rewritten = True
        elif node.target is operator.getitem and isinstance(values[node.args[0]], Sequence):
            new = values[node.args[0]][node.args[1]]
        else:
            new = graph.node_copy(node, values.__getitem__)
        values[node] = new
    graph.eliminate_dead_code()
    return graph_module_of(graph_module, graph) if is_rewritten else graph_module

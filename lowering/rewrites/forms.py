"""Graphs written anew, where some values are computed in another form than they had."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import fx

from lowering.graph_modules import graph_module_of
from lowering.nodes import takes_static_tensors
from lowering.rewrites.recorder import Recorder
from lowering.sizes import are_same


class _NoWayBackError(Exception):
    """A value cannot be written as it was: not for all sizes that it may be of."""


class Forms(ABC):
    """Writes a graph anew, and remembers which values it has in which form.

    A node is written in the other form where `move` can; what needs it as it was gets it from
    `restored`, at the first such place.

    Attributes:
        moved: nodes of the old graph -> nodes of the new one, of the other form.
        plain: nodes of the old graph -> nodes of the new one, as they were.
        is_changed: whether a node is computed in the other form, or its change of form left out.
        takes: whether a node takes what can be computed in the other form.
    """

    takes: Callable[[fx.Node], bool] = staticmethod(takes_static_tensors)

    def __init__(self, keep_ops: frozenset[str] = frozenset()) -> None:
        self.moved = dict[fx.Node, Any]()
        self.plain = dict[fx.Node, Any]()
        self._graph = fx.Graph()
        self._recorder = Recorder(self._graph, keep_ops)
        self.is_changed = False

    def rewrite(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Return a new graph, or the same one if nothing is computed in another form.

        Args:
            graph_module: of a region; every node carries its fake tensor.
        """
        try:
            for node in graph_module.graph.nodes:
                if not self.move(node):
                    self.plain[node] = self._graph.node_copy(node, self.as_plain)
                    self.copied(node)
        except _NoWayBackError:
            return graph_module
        if not self.is_changed:
            return graph_module
        self._graph.eliminate_dead_code()
        return graph_module_of(graph_module, self._graph)

    @abstractmethod
    def move(self, node: fx.Node) -> bool:
        """Write a node in the other form; say whether that was done."""

    @abstractmethod
    def restored(self, node: fx.Node) -> Any:
        """Write the value of a node as it was, from the other form."""

    @abstractmethod
    def aligned(self, operand: fx.Node, node: fx.Node) -> Any:
        """Write an operand such that it goes with those in the other form; None: it cannot."""

    def leads(self, operand: fx.Node, node: fx.Node) -> bool:
        """Say whether an op is computed in the other form for this operand: it has all numbers."""
        return are_same(operand.meta["val"].shape, node.meta["val"].shape)

    def copied(self, node: fx.Node) -> None:  # noqa: B027
        """See a node that is as it was; most are left at that."""

    def as_plain(self, node: fx.Node) -> Any:
        """Return the value of a node as it was."""
        if node not in self.plain:
            value = self.restored(node)
            if value is NotImplemented:
                raise _NoWayBackError(node.name)
            self.plain[node] = value
        return self.plain[node]

    def write(self, node: fx.Node, function: Callable[..., Any], *args: Any) -> Any:
        """Write what a function of tensors computes, in the place of a node, whose op is final.

        Args:
            node: of the old graph.
            function: may return `NotImplemented`, and so does this then.
            args: with nodes of the new graph as tensors.
        """
        return self._recorder.record(function, args, node.meta, node.target)

    def write_of(self, node: fx.Node, operands: Mapping[fx.Node, Any]) -> Any:
        """Write what a node computes, of nodes of the new graph in the place of its operands."""
        function = functools.partial(cast(Callable[..., Any], node.target), **node.kwargs)
        return self.write(node, function, *fx.map_arg(node.args, operands.__getitem__))

    def moves(self, node: fx.Node, value: Any) -> bool:
        """Say that a node has this value in the other form; False, if it is `NotImplemented`."""
        if value is NotImplemented:
            return False
        self.moved[node] = value
        self.is_changed = True
        return True

    def move_pointwise(self, node: fx.Node) -> bool:
        """Write an op of each number by itself, if an operand that `leads` it is moved."""
        if not is_pointwise(node) or not self.takes(node):
            return False
        operands = dict[fx.Node, Any]()
        for operand in node.all_input_nodes:
            if operand in self.moved and self.leads(operand, node):
                operands[operand] = self.moved[operand]
        if not operands:
            return False
        for operand in node.all_input_nodes:
            if isinstance(operand.meta["val"], torch.SymInt):
                operands[operand] = self.as_plain(operand)
            elif operand not in operands:
                operands[operand] = self.aligned(operand, node)
        if None in operands.values() or NotImplemented in operands.values():
            return False
        return self.moves(node, self.write_of(node, operands))


def is_pointwise(node: fx.Node) -> bool:
    """Say whether an op computes each number of a tensor by itself, of those in its place."""
    is_of_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    if not is_of_tensor or not isinstance(node.target, torch._ops.OpOverload):
        return False
    tags = node.target.tags
    is_same = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return is_same and not any(isinstance(v, fx.Node) for v in node.kwargs.values())

"""Functions of tensors, written down as nodes of a graph."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lowering.decompositions import decomposition_table
from lowering.nodes import origin_of

_KEPT = ("mv",)  # what a rewrite writes because it is to stay


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes the ops that run under it into a graph, decomposed.

    PyTorch's own tracers patch its modules while they run; regions are compiled in several threads
    at a time, so this one does not.

    Attributes:
        graph: gets the nodes.
    """

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph
        self._table = _table()
        self._fakes = FakeTensorMode()
        self._meta: Mapping[str, Any] = {}
        self._nodes: dict[int, tuple[torch.Tensor, fx.Node]] = {}

    def record(self, function: Callable[..., Any], args: Any, meta: Mapping[str, Any]) -> Any:
        """Call a function.

        Args:
            function: of tensors.
            args: of the call; nodes of the graph stand for tensors.
            meta: of the node that the call stands for.

        Returns:
            What the function returned, with nodes in the place of tensors.
        """
        self._meta = origin_of(meta)
        with self._fakes, torch.no_grad():
            args = fx.map_arg(args, self._tensor)
            with self:
                result = function(*args)
        return pytree.tree_map_only(torch.Tensor, self._node, result)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._table:
            with self:
                result = self._table[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not isinstance(result, (torch.Tensor, tuple, list)):
            return result  # what a tensor is: its device, say
        given, named = pytree.tree_map_only(torch.Tensor, self._node, (args, kwargs))
        self._write(func, given, named, result)
        return result

    def _write(self, target: Any, args: Any, kwargs: Any, value: Any) -> None:
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {**self._meta, "val": value}
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = value, node
            return
        for i, part in enumerate(value):
            if part is not None:
                self._write(operator.getitem, (node, i), {}, part)

    def _tensor(self, node: fx.Node) -> torch.Tensor:
        """Give a tensor that stands for a node: dense, as all values of a region are."""
        value = node.meta["val"]
        fake = torch.empty(value.shape, dtype=value.dtype)
        self._nodes[id(fake)] = fake, node
        return fake

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        return self._nodes[id(tensor)][1]


@functools.cache
def _table() -> Mapping[OpOverload, Callable[..., Any]]:
    return decomposition_table(keep_ops=_KEPT)

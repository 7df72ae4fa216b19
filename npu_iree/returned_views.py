"""Results that are views of arguments, or of other results: made of these in each call.

Of an argument, AOTAutograd makes them outside of the graph: by the views that it saw, or, where
their places depend on sizes, at the place that the graph's result has in its own memory. Only
PyTorch's kernels give that place; and of an argument that begins in the middle of its memory, or
has gaps, it is the wrong one (PyTorch 2.13, with `aot_eager` too). The same goes for views of
results in training; in inference, it takes for granted that they share memory.
Source: `gen_alias_from_base` in torch/_functorch/_aot_autograd/functional_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType

from lowering.nodes import is_scalar, is_view, view_root

aten = torch.ops.aten
# What puts a view of a tensor back into it -> the view.
_VIEW_OF: Mapping[Any, Callable[..., Any]] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def views_of_arguments(found: Any) -> list[int]:
    """Find the results that AOTAutograd makes of arguments, where the graph's results lie.

    Args:
        found: what it has found out about the graph (`npu_iree.aot.metadata`).

    Returns:
        Their positions.
    """
    return [
        found.num_mutated_inp_runtime_indices + i
        for i, info in enumerate(found.output_info)
        if info.output_type is OutputType.alias_of_input and not _is_replayed(info)
    ]


def _is_replayed(info: Any) -> bool:
    views = info.view_meta_sequence
    return views is not None and not any(view.has_symbolic_inputs for view in views.sequence)


@dataclass(frozen=True)
class ReturnedViews:
    """The results of a graph that are views, of its arguments or of other results.

    Attributes:
        positions: of these results.
        arguments: positions of the arguments that they are made of, or whose sizes they need.
        bases: positions of the results that they are made of.
        make: makes them, of such arguments and results.
    """

    positions: Sequence[int]
    arguments: Sequence[int]
    bases: Sequence[int]
    make: Callable[..., Sequence[torch.Tensor]]

    @classmethod
    def taken_out(
        cls, graph_module: fx.GraphModule, aliases: Collection[int], *, of_results: bool
    ) -> ReturnedViews | None:
        """Take the views out of the results of a graph, which are None there; None if none is.

        Args:
            graph_module: the graph, which is changed.
            aliases: positions of results that are views of arguments.
            of_results: whether views of other results are taken out, too.
        """
        if not aliases and not of_results:
            return None
        output = graph_module.graph.output_node()
        results = list(output.args[0])  # type: ignore[arg-type]
        bases = {n: i for i, n in reversed([*enumerate(results)]) if of_results and _is_whole(n)}
        views, made = _Views(graph_module.graph, bases), dict[int, fx.Node]()
        for i, node in enumerate(results):
            if isinstance(node, fx.Node) and (i in aliases or bases.get(view_root(node), i) != i):
                view = views.of(node)
                if view is not None:
                    made[i] = views.graph.call_function(aten.alias.default, (view,))
                    results[i] = None
        if not made:
            return None
        output.args = (tuple(results),)
        graph_module.recompile()
        views.graph.output(tuple(made.values()))
        arguments, used = views.keep_used()
        make = fx.GraphModule(torch.nn.Module(), views.graph).forward
        return cls(tuple(made), arguments, [bases[node] for node in used], make)

    def run(self, runner: Callable[[list[Any]], Iterable[Any]], args: list[Any]) -> list[Any]:
        """Run the graph on arguments that are taken out of their list; return all its results."""
        read = [args[i] for i in self.arguments]
        results = list(runner(args))
        made = self.make(*read, *[results[i] for i in self.bases])
        for i, view in zip(self.positions, made, strict=True):
            results[i] = view
        return results


def _is_whole(node: Any) -> bool:
    """Say whether a result is a tensor of its own, no view and no argument."""
    is_made = isinstance(node, fx.Node) and node.op == "call_function" and not is_view(node)
    return is_made and isinstance(node.meta.get("val"), torch.Tensor)


class _Views:
    """Tensors of a graph as views of its inputs and results, in a graph that takes these.

    Attributes:
        graph: the views; it has no output yet.
    """

    def __init__(self, graph: fx.Graph, bases: Iterable[fx.Node]) -> None:
        self.graph = fx.Graph()
        inputs = graph.find_nodes(op="placeholder")
        self._inputs = {node: self.graph.placeholder(node.name) for node in inputs}
        self._bases = {node: self.graph.placeholder(node.name) for node in bases}
        self._found = self._inputs | self._bases
        self._numbers = {
            str(value): node
            for node in reversed(graph.nodes)
            if isinstance(value := node.meta.get("val"), torch.SymInt)
        }
        for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
            target, value = copy.args[:2]
            if target in self._inputs and isinstance(value, fx.Node):
                self._found.setdefault(value, self._inputs[target])
                self._look_into(value)

    def keep_used(self) -> tuple[Sequence[int], Sequence[fx.Node]]:
        """Let the graph take no more than it reads; return positions of inputs, and results."""
        arguments = [i for i, taken in enumerate(self._inputs.values()) if taken.users]
        results = [node for node, taken in self._bases.items() if taken.users]
        for taken in (*self._inputs.values(), *self._bases.values()):
            if not taken.users:
                self.graph.erase_node(taken)
        return arguments, results

    def of(self, node: fx.Node) -> fx.Node | None:
        """Return a tensor as a view of an input, or of what is written to one; None if none."""
        if node not in self._found and is_view(node) and isinstance(node.args[0], fx.Node):
            base = self.of(node.args[0])
            if base is None or any(self._number(n) is None for n in node.all_input_nodes[1:]):
                return None
            self._view(node, node.target, base, node.args[1:], node.kwargs)
        return self._found.get(node)

    def _look_into(self, node: fx.Node) -> None:
        """Find what else is a part, or another order, of what is written to an input."""
        whole, inner = self._found[node], node.args[0] if node.args else None
        if node.target in _VIEW_OF:
            inner = node.args[1]
            if any(self._number(n) is None for n in node.all_input_nodes if n not in node.args[:2]):
                return
            self._view(inner, _VIEW_OF[node.target], whole, node.args[2:], node.kwargs)
        elif node.target is aten.permute.default:
            dims: Any = node.args[1]
            order = [[d % len(dims) for d in dims].index(d) for d in range(len(dims))]
            self._view(inner, node.target, whole, (order,))
        elif node.target in (aten.t.default, aten.transpose.int):
            self._view(inner, node.target, whole, node.args[1:])
        elif node.target is aten.unsqueeze.default:
            self._view(inner, aten.squeeze.dim, whole, node.args[1:])
        elif node.target in _RESHAPES and isinstance(inner, fx.Node):
            sizes = [self._size(size) for size in inner.meta["val"].shape]
            if None in sizes:
                return
            self._view(inner, aten.view.default, whole, (sizes,))
        else:
            return
        self._look_into(inner)  # type: ignore[arg-type]

    def _view(
        self, node: Any, target: Any, base: fx.Node, args: Any, kwargs: Mapping[str, Any] = {}
    ) -> None:
        mapped = fx.map_arg((args, dict(kwargs)), lambda n: self._found[n])
        if node not in self._found:
            self._found[node] = self.graph.call_function(target, (base, *mapped[0]), mapped[1])

    def _size(self, size: int | torch.SymInt) -> int | fx.Node | None:
        if isinstance(size, int):
            return size
        node = self._numbers.get(str(size))
        return None if node is None or self._number(node) is None else node

    def _number(self, node: fx.Node) -> fx.Node | None:
        """Return a size in the graph of views; None if it depends on what is computed."""
        if node not in self._found:
            if not is_scalar(node):
                return None
            known = self._numbers.get(str(node.meta["val"]), node)
            if known is not node:
                found = self._number(known)
            elif all(self._number(n) is not None for n in node.all_input_nodes):
                found = self.graph.node_copy(node, lambda n: self._found[n])
            else:
                found = None
            if found is None:
                return None
            self._found[node] = found
        return self._found[node]

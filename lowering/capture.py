"""One form for every captured graph: functional ATen, with the role of each input known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowering.errors import InternalError
from lowering.graph_modules import with_code
from lowering.nodes import view_root
from lowering.normalize import normalize

aten = torch.ops.aten

# Tensor constants up to this many elements stay in the IR, where the compiler can fold them.
INLINE_CONSTANT_ELEMENTS = 16


@dataclass(frozen=True)
class CapturedGraph:
    """A functional ATen graph, and what is written to its inputs when all of it has been computed.

    Attributes:
        graph_module: the graph; nodes are placeholders, `call_function` of ATen ops (or of Python
            arithmetic on symbolic sizes), `get_attr` of constants, and one output.
        inputs: the placeholders, in the order of the call.
        weights: those placeholders whose tensors keep their identity between calls.
        constants: tensors that the graph itself holds, by the name of their node.
        kind: what AOTAutograd made it for: `inference`, `forward` (of training) or `backward`.
        written: the inputs that are written to, in this order; the last outputs are the values.
        handles: those inputs that are on the device when a call begins.
        kept: those results that stay there.
        donated: those of the handles that a call takes over: nobody reads them afterwards.
    """

    graph_module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    weights: frozenset[fx.Node]
    constants: dict[fx.Node, torch.Tensor]
    kind: str = "inference"
    written: tuple[fx.Node, ...] = ()
    handles: frozenset[fx.Node] = frozenset()
    kept: frozenset[fx.Node] = frozenset()
    donated: frozenset[fx.Node] = frozenset()

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes that compute something, in a valid order."""
        return tuple(n for n in self.graph_module.graph.nodes if n.op == "call_function")

    @property
    def outputs(self) -> tuple[object, ...]:
        """What the graph returns, then what it writes: a node, None or a Python scalar each."""
        return _outputs(self.graph_module.graph)

    @property
    def results(self) -> tuple[object, ...]:
        """What the graph returns."""
        return self.outputs[: len(self.outputs) - len(self.written)]

    @property
    def writes(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """What is written: (input, new value), in order."""
        values = self.outputs[len(self.results) :]
        pairs = zip(self.written, values, strict=True)
        return tuple((node, value) for node, value in pairs if isinstance(value, fx.Node))

    def eager(self) -> Callable[[list[Any]], list[Any]]:
        """Return what runs the graph with PyTorch's own kernels.

        It takes its arguments out of their list, as AOTAutograd's compiled graphs do.
        """
        forward, inputs, written = with_code(self.graph_module), self.inputs, self.written
        count = len(self.results)

        def run(args: list[Any]) -> list[Any]:
            values = list(forward(*args))
            news = [v.clone() if any(v is arg for arg in args) else v for v in values[count:]]
            arguments = dict(zip(inputs, args, strict=True))
            args.clear()
            for node, value in zip(written, news, strict=True):
                arguments[node].data.copy_(value)  # AOTAutograd counts the version
            return values[:count]

        return run


def capture_aot(
    graph_module: fx.GraphModule,
    weights: Iterable[int] = (),
    names: Sequence[str] = (),
    kind: str = "inference",
) -> CapturedGraph:
    """Take a graph as AOTAutograd hands it to a compiler.

    Args:
        graph_module: forward, backward or inference graph of AOTAutograd.
        weights: positions of the inputs that are parameters or buffers (`static_input_indices`).
        names: what the user would call the inputs, for reports; may be left out.
        kind: what AOTAutograd made it for.

    Raises:
        InternalError: the graph calls modules or methods, which AOTAutograd never leaves.
    """
    written = _take_writes(graph_module.graph)
    _view_results_apart(graph_module.graph, written, is_inference=kind == "inference")
    constants = normalize(graph_module)
    inputs = tuple(graph_module.graph.find_nodes(op="placeholder"))
    for node, name in zip(inputs, names, strict=False):
        node._rename(name)
    bindable = frozenset(inputs[i] for i in weights if i < len(inputs)).difference(written)
    return CapturedGraph(graph_module, inputs, bindable, constants, kind, written)


def _take_writes(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Make a graph functional that writes to its inputs at its end; return which it writes to.

    Before: %1 = add(%x, 1); %2 = copy_(%x, %1); return [%y]
    After:  %1 = add(%x, 1); return [%y, %1]                  with %x written
    """
    writes: list[tuple[fx.Node, fx.Node]] = []
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, value = node.args[:2]
        if target.op != "placeholder" or any(user.op != "output" for user in node.users):
            raise InternalError(f"in a functional graph, {node.format_node()} is not at the end")
        node.replace_all_uses_with(target)
        graph.erase_node(node)
        writes.append((target, value))
    if writes:
        outputs: Any = (*_outputs(graph), *(value for _, value in writes))
        graph.output_node().args = (outputs,)
    return tuple(target for target, _ in writes)


def _view_results_apart(
    graph: fx.Graph, written: Collection[fx.Node], *, is_inference: bool
) -> None:
    """Give each result that is a view of an input a view of its own, which nothing else reads.

    Such a view is made on the host, and shares the input's memory and version: autograd saves it
    for the backward pass, and looks whether somebody has written to it. So does, in inference, a
    view of another result (in training, AOTAutograd makes those that the user sees anew).

    Before: %1 = permute(%x, [1, 0]); %2 = mm(%y, %1); return [%2, %1]
    After:  %1 = permute(%x, [1, 0]); %2 = mm(%y, %1); %3 = permute(%x, [1, 0]); return [%2, %3]
    """
    output = graph.output_node()
    roots = {result: view_root(result) for result in output.all_input_nodes}
    shared = Counter(roots.values())
    again: dict[fx.Node, fx.Node] = {}
    for result, root in roots.items():
        is_shared = root.op == "placeholder" or (is_inference and shared[root] > 1)
        if root is not result and is_shared and root not in written:
            with graph.inserting_before(output):
                output.replace_input_with(result, _view_again(result, root, again))


def _view_again(node: fx.Node, root: fx.Node, again: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy the views that lead from a node to a view of it, those that are not in `again` yet."""
    if node is root:
        return root
    if node not in again:
        base = node.args[0]
        assert isinstance(base, fx.Node)
        copied = _view_again(base, root, again)
        again[node] = node.graph.node_copy(node, lambda n: copied if n is base else n)
    return again[node]


def _outputs(graph: fx.Graph) -> tuple[object, ...]:
    (values,) = graph.output_node().args
    return tuple(values) if isinstance(values, (list, tuple)) else (values,)

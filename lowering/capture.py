"""One form for every captured graph: functional ATen, with the role of each input known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from lowering.errors import InternalError

# Tensor constants up to this many elements stay in the IR, where the compiler can fold them.
INLINE_CONSTANT_ELEMENTS = 16

# AOTAutograd turns Python floats into tensors after decomposition, with ops outside core ATen.
_CANONICAL = {torch.ops.aten.true_divide.Tensor: torch.ops.aten.div.Tensor}
# torch-mlir crashes on these where the dimension is counted from the end.
_FROM_THE_END = frozenset(
    {"aten.scatter", "aten.scatter_add", "aten.scatter_reduce", "aten.gather"}
)


@dataclass(frozen=True)
class CapturedGraph:
    """A functional ATen graph.

    Attributes:
        graph_module: the graph; nodes are placeholders, `call_function` of ATen ops (or of Python
            arithmetic on symbolic sizes), `get_attr` of constants, and one output.
        inputs: the placeholders, in the order of the call.
        weights: those placeholders whose tensors keep their identity between calls.
        constants: tensors that the graph itself holds, by the name of their node.
        kind: what AOTAutograd made it for: `inference`, `forward` (of training) or `backward`.
        handles: those inputs that are on the device when a call begins.
        kept: those results that stay there.
    """

    graph_module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    weights: frozenset[fx.Node]
    constants: dict[fx.Node, torch.Tensor]
    kind: str = "inference"
    handles: frozenset[fx.Node] = frozenset()
    kept: frozenset[fx.Node] = frozenset()

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes that compute something, in a valid order."""
        return tuple(n for n in self.graph_module.graph.nodes if n.op == "call_function")

    @property
    def outputs(self) -> tuple[object, ...]:
        """What the graph returns: a node, None or a Python scalar each."""
        (output,) = self.graph_module.graph.find_nodes(op="output")
        (values,) = output.args
        return tuple(values) if isinstance(values, (list, tuple)) else (values,)


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
    constants = normalize(graph_module)
    inputs = tuple(graph_module.graph.find_nodes(op="placeholder"))
    for node, name in zip(inputs, names, strict=False):
        node._rename(name)
    bindable = frozenset(inputs[i] for i in weights if i < len(inputs))
    return CapturedGraph(graph_module, inputs, bindable, constants, kind)


def normalize(graph_module: fx.GraphModule) -> dict[fx.Node, torch.Tensor]:
    """Bring a functional graph, in place, into the one form that the rest of the house reads.

    Returns:
        The tensors that the graph itself holds, by their nodes.

    Raises:
        InternalError: the graph calls modules or methods.
    """
    _share_sizes(graph_module.graph)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    constants: dict[fx.Node, torch.Tensor] = {}
    for node in graph_module.graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise InternalError(f"a functional graph has no {node.op}: {node.format_node()}")
        node.target = _CANONICAL.get(node.target, node.target)
        if str(node.target).rpartition(".")[0] in _FROM_THE_END and node.args[1] < 0:
            node.update_arg(1, node.args[1] + max(1, node.meta["val"].dim()))
        if node.op == "get_attr":
            value = attribute(graph_module, str(node.target))
            if isinstance(value, torch.Tensor):
                constants[node] = value
                node.meta.setdefault("val", value)
    return constants


def _share_sizes(graph: fx.Graph) -> None:
    """Take each size from where it is known first: from an input, rather than from a result.

    Before: %s = input (s0); %1 = relu(%0); %2 = sym_size(%1, 0); %3 = view(%1, [%2])
    After:  %s = input (s0); %1 = relu(%0); %3 = view(%1, [%s])
    """
    known: dict[str, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            first = known.setdefault(str(value.node.expr), node)
            if first is not node and node.op == "call_function":
                node.replace_all_uses_with(first)


def attribute(module: torch.nn.Module, path: str) -> object:
    """Return what a dotted path names in a module."""
    value: object = module
    for name in path.split("."):
        value = getattr(value, name)
    return value

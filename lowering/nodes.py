"""What an FX node is to the partitioner: a number, a move, a source of random numbers."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from lowering.op_names import op_name
from lowering.sizes import is_static

# Views and copies: a region of these alone computes nothing, so it is not worth a transfer.
MOVE_OPS = frozenset(
    [
        "aten.alias",
        "aten.alias_copy",
        "aten.as_strided",
        "aten.clone",
        "aten.copy",
        "aten.detach",
        "aten.diagonal",
        "aten.expand",
        "aten.lift_fresh_copy",
        "aten.permute",
        "aten.select",
        "aten.slice",
        "aten.split",
        "aten.split_with_sizes",
        "aten.squeeze",
        "aten.t",
        "aten.transpose",
        "aten.unbind",
        "aten.unfold",
        "aten.unsqueeze",
        "aten.view",
        "aten.view_as_complex",
        "aten.view_as_real",
        "aten._reshape_alias",
        "aten._to_copy",
        "aten._unsafe_view",
    ]
)
# Moves whose result is the memory of their argument.
VIEW_OPS = MOVE_OPS - {
    "aten.alias_copy",
    "aten.clone",
    "aten.copy",
    "aten.lift_fresh_copy",
    "aten._to_copy",
}
# What these give depends on where in memory their argument lies, and how.
STORAGE_OPS = frozenset(["aten.as_strided", "aten.as_strided_copy", "aten.as_strided_scatter"])
# Made from nothing: alone they are not worth a region either.
FACTORY_OPS = frozenset(
    [
        "aten.arange",
        "aten.empty",
        "aten.empty_permuted",
        "aten.eye",
        "aten.full",
        "aten.linspace",
        "aten.ones",
        "aten.scalar_tensor",
        "aten.zeros",
    ]
)

# What may raise, and does nothing else.
ASSERTIONS = frozenset({"aten._assert_async"})

# What of a node's meta is not of its value. PyTorch notes the op that was decomposed.
_OF_ORIGIN = ("nn_module_stack", "original_aten", "stack_trace")

# What gives a number that a tensor's shape and memory order say.
SIZE_OPS = frozenset(
    {
        torch.ops.aten.sym_numel.default,
        torch.ops.aten.sym_size.int,
        torch.ops.aten.sym_stride.int,
    }
)


def origin_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a node's meta tells where it comes from; the rest is of its value."""
    return {name: meta[name] for name in _OF_ORIGIN if name in meta}


def write_call(
    graph: fx.Graph, origin: fx.Node, value: Any, target: Any, /, *args: Any, **kwargs: Any
) -> fx.Node:
    """Write a call that gives something like `value`, in the name of another node."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {**origin_of(origin.meta), "val": value}
    return node


def view_root(node: fx.Node) -> fx.Node:
    """Return the node whose memory `node` is a view of; itself if it is no view."""
    return view_chain(node)[-1]


def view_chain(node: fx.Node) -> list[fx.Node]:
    """Return `node`, what it is a view of, what that is a view of, and so on."""
    chain = [node]
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        chain.append(node)
    return chain


def is_view(node: fx.Node) -> bool:
    """Say whether what a node gives is memory of its argument: a view, or one of several."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and is_one_of(source, VIEW_OPS)


def is_scalar(node: fx.Node) -> bool:
    """Say whether a node is arithmetic on sizes: no tensor's bytes are read or written."""
    if node.op != "call_function" or not is_number(node.meta.get("val")):
        return False
    if node.target in SIZE_OPS:
        return True
    return all(is_number(n.meta.get("val")) for n in node.all_input_nodes)


def is_number(value: object) -> bool:
    """Say whether a value is a number, symbolic or not."""
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_one_of(node: fx.Node, packets: frozenset[str]) -> bool:
    """Say whether a node calls one of these ops, in any overload."""
    return op_name(node.target).rpartition(".")[0] in packets


def draws_random_numbers(node: fx.Node) -> bool:
    """Say whether a node reads and advances a random generator."""
    target = node.target
    seeded = torch.Tag.nondeterministic_seeded
    return isinstance(target, torch._ops.OpOverload) and seeded in target.tags


def makes_sizes(node: fx.Node) -> bool:
    """Say whether sizes of a node's result depend on its arguments' data: `x[x > 0]`."""
    made = _unbacked(node.meta.get("val"))
    known = [_unbacked(n.meta.get("val")) for n in node.all_input_nodes] if made else []
    return bool(made.difference(*known))


def _unbacked(value: object) -> frozenset[object]:
    sized = [v for v in pytree.tree_leaves(value) if isinstance(v, (torch.Tensor, torch.SymInt))]
    return frozenset(symbol for v in sized for symbol in free_unbacked_symbols(v))


def takes_tensors(node: fx.Node) -> bool:
    """Say whether all that a node takes of others are tensors, and sizes."""
    inputs = [n.meta.get("val") for n in node.all_input_nodes]
    return all(isinstance(value, (torch.Tensor, torch.SymInt)) for value in inputs)


def takes_static_tensors(node: fx.Node) -> bool:
    """Say whether all that a node takes of others are tensors of sizes that do not change."""
    inputs = [n.meta.get("val") for n in node.all_input_nodes]
    return all(isinstance(value, torch.Tensor) and is_static(value) for value in inputs)


def has_effect(node: fx.Node) -> bool:
    """Say whether a node must keep its place among others of its kind.

    A higher-order op may draw random numbers in its body, or restore a generator's state.
    """
    if is_one_of(node, ASSERTIONS):
        return False
    is_higher_order = isinstance(node.target, torch._ops.HigherOrderOperator)
    return is_higher_order or draws_random_numbers(node) or bool(node.is_impure())


def sources(nodes: Iterable[fx.Node], known: Container[fx.Node]) -> Iterator[fx.Node]:
    """Give those of `known` that nodes are, or are computed of by way of others (sizes)."""
    seen, stack = set[fx.Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in known:
            yield node
        else:
            stack += node.all_input_nodes


def is_subgraph(node: fx.Node) -> bool:
    """Say whether a node is the body of a higher-order op, e.g. a branch of `torch.cond`."""
    return node.op == "get_attr" and "val" not in node.meta


def converted(value: object) -> fx.Node | None:
    """Return the tensor of another dtype that a value was made of; None if of none."""
    convert = torch.ops.prims.convert_element_type.default
    if not isinstance(value, fx.Node) or value.target is not convert:
        return None
    source = value.args[0]
    return source if isinstance(source, fx.Node) else None

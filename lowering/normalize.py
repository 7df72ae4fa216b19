"""The one form of a functional graph, and the passes, all in place, that bring it there."""

from __future__ import annotations

import contextlib
import operator
import sys
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._prims.rng_prims import run_and_save_rng_state

from lowering.comparisons import compare_with_tensors
from lowering.empty import make_empty_values
from lowering.errors import InternalError
from lowering.nodes import is_view, view_root, write_call
from lowering.randomness import read_sizes_only
from lowering.sizes import is_static

aten = torch.ops.aten

_MOST_EXACT = 256  # below that, all dtypes have whole numbers exactly
# AOTAutograd turns Python floats into tensors after decomposition, with ops outside core ATen.
_CANONICAL = {aten.true_divide.Tensor: aten.div.Tensor}
# op -> the place of the argument that it gives if it slices all there is.
_OF_SLICES = {aten.slice.Tensor: 0, aten.slice_scatter.default: 1}
_OF_FRESH_MEMORY = frozenset({aten.slice_scatter.default})
_LIMITS_OF_ALL = ((0, None), (sys.maxsize, None), (1,))  # start, end, step
# torch-mlir crashes on these where the dimension is counted from the end.
_FROM_THE_END = frozenset(
    {"aten.scatter", "aten.scatter_add", "aten.scatter_reduce", "aten.gather"}
)


def normalize(graph_module: fx.GraphModule) -> dict[fx.Node, torch.Tensor]:
    """Bring a functional graph, in place, into the one form that the rest of the house reads.

    Returns:
        The tensors that the graph itself holds, by their nodes.

    Raises:
        InternalError: the graph calls modules or methods.
    """
    read_sizes_only(graph_module.graph)
    _add_one_by_one(graph_module.graph)
    _share_sizes(graph_module.graph)
    _drop_whole_slices(graph_module.graph)
    _drop_strides(graph_module.graph)
    _view_what_replaces_all(graph_module.graph)
    make_empty_values(graph_module.graph)
    compare_with_tensors(graph_module.graph)
    _raise_to_numbers(graph_module.graph)
    graph_module.graph.eliminate_dead_code()
    constants: dict[fx.Node, torch.Tensor] = {}
    for node in graph_module.graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise InternalError(f"a functional graph has no {node.op}: {node.format_node()}")
        if node.op == "call_function" and "val" not in node.meta:
            node.meta["val"] = _fake_result(node)
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


def _add_one_by_one(graph: fx.Graph) -> None:
    """Write sums of many sizes as additions, which are all that stands for sizes in a program.

    Before: %s = sym_sum([%a, %b, 1])
    After:  %t = add(%a, %b); %s = add(%t, 1)
    """
    for node in graph.find_nodes(op="call_function", target=torch.sym_sum):
        parts: Any = node.args[0]
        with graph.inserting_before(node):
            total = parts[0]
            for part in parts[1:]:
                total = graph.call_function(operator.add, (total, part))
                total.meta = {**node.meta, "val": _fake_result(total)}
        node.replace_all_uses_with(total)


def _raise_to_numbers(graph: fx.Graph) -> None:
    """Raise to a whole number that is written down, where AOTAutograd made a tensor of it.

    It computes sizes as tensors, after decomposition, where a float is computed of them.

    Before: %1 = scalar_tensor(2); %2 = pow.Tensor_Tensor(%0, %1)
    After:  %2 = pow.Tensor_Scalar(%0, 2)
    """
    for node in graph.find_nodes(op="call_function", target=aten.pow.Tensor_Tensor):
        base, exponent = node.args
        number: Any = exponent.args[0] if exponent.target is aten.scalar_tensor.default else None
        value = base.meta["val"]
        is_same = value.dtype is node.meta["val"].dtype and value.dtype.is_floating_point
        if is_same and number in range(_MOST_EXACT):
            node.target = aten.pow.Tensor_Scalar
            node.update_arg(1, number)


def _drop_whole_slices(graph: fx.Graph) -> None:
    """Take the values themselves for slices of all there is, and what replaces all for the whole.

    Functionalization writes one of each per dimension that an index leaves as it is.

    Before: %1 = slice(%0, 0, 0, 2**63 - 1); %2 = slice_scatter(%0, %1, 0, 0, 2**63 - 1); exp(%2)
    After:  exp(%0)
    """
    for node in graph.nodes:
        place = _OF_SLICES.get(node.target)
        if place is None or not _is_whole(node, place):
            continue
        value: Any = node.args[place]
        keeps = _leads_to_result if node.target in _OF_FRESH_MEMORY else _is_output
        node.replace_all_uses_with(value, lambda user, keeps=keeps: not keeps(user))


def _is_output(node: fx.Node) -> bool:
    return node.op == "output"


def _leads_to_result(node: fx.Node) -> bool:
    """Say whether the graph returns memory of what a node reads, if that is viewed."""
    return node.op == "output" or (is_view(node) and any(map(_leads_to_result, node.users)))


def _is_whole(node: fx.Node, place: int) -> bool:
    args: tuple[Any, ...] = node.args
    limits = zip(args[place + 2 :], _LIMITS_OF_ALL, strict=False)  # those left out are of all
    if node.kwargs or not all(limit in allowed for limit, allowed in limits):
        return False
    one, other = args[0].meta.get("val"), args[place].meta.get("val")
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    return one.dtype is other.dtype and str(one.shape) == str(other.shape)


def _drop_strides(graph: fx.Graph) -> None:
    """Take a computed value itself where it is given other strides for its dimensions of 1.

    `F.adaptive_avg_pool2d(x, 1)` does so of images whose channels come last.

    Before: %1 = as_strided(%0, [s0, 8, 1, 1], [8, 1, 8, 8]); exp(%1)       with %0 of [s0, 8, 1, 1]
    After:  exp(%0)
    """
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        value: Any = node.args[0]
        if view_root(value).op != "placeholder" and _is_same_layout(value, node):
            node.replace_all_uses_with(value, lambda user: user.op != "output")


def _is_same_layout(one: fx.Node, other: fx.Node) -> bool:
    layouts = []
    for value in (one.meta["val"], other.meta["val"]):
        sizes, strides = value.shape, value.stride()
        layout = [step for size, step in zip(sizes, strides, strict=True) if str(size) != "1"]
        layouts.append(f"{list(sizes)} {layout} {value.storage_offset()}")
    return layouts[0] == layouts[1]


def _view_what_replaces_all(graph: fx.Graph) -> None:
    """Take a view of what replaces all elements of a computed value by their places in memory.

    So does the backward pass of a mean over images whose channels come last.

    Before: %2 = as_strided_scatter(%0, %1, [2, 6], [6, 1], 0)        with %0 of [12], %1 of [2, 6]
    After:  %2 = view(%1, [12])                         of a clone of %1, if %2 is returned
    """
    op = aten.as_strided_scatter.default
    for node in graph.find_nodes(op="call_function", target=op):
        value, source, *layout = node.args
        if view_root(value).op != "placeholder" and _is_all_of(value, source, *layout):
            with graph.inserting_before(node):
                sizes = list(value.meta["val"].shape)
                if any(map(_leads_to_result, node.users)):
                    source = write_call(
                        graph, source, source.meta["val"], aten.clone.default, source
                    )
                view = write_call(graph, node, node.meta["val"], aten.view.default, source, sizes)
            node.replace_all_uses_with(view)


def _is_all_of(value: fx.Node, source: fx.Node, sizes: Any, strides: Any, offset: Any = 0) -> bool:
    one, other = value.meta["val"], source.meta["val"]
    if not is_static(one, other) or (one.dtype, one.numel()) != (other.dtype, other.numel()):
        return False
    is_dense = one.is_contiguous() and other.is_contiguous()
    layout, first = (list(other.shape), list(other.stride())), one.storage_offset()
    return is_dense and (list(sizes), list(strides)) == layout and (offset or 0) == first == 0


def _fake_result(node: fx.Node) -> Any:
    """Say what a node gives: AOTAutograd's partitioner makes some and leaves it out."""
    target: Any = node.target
    args: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    with detect_fake_mode(args) or contextlib.nullcontext() as mode:
        if target is run_and_save_rng_state:  # PyTorch's fake one knows its own devices alone
            op, *rest = args
            state = torch.default_generator.get_state()
            return mode.from_tensor(state) if mode else state, op(*rest, **kwargs)
        return target(*args, **kwargs)


def attribute(module: torch.nn.Module, path: str) -> object:
    """Return what a dotted path names in a module."""
    value: object = module
    for name in path.split("."):
        value = getattr(value, name)
    return value

"""A device region as the compiler sees it: a graph of its own, with a signature."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from lowering.abi import parameter_name
from lowering.capture import INLINE_CONSTANT_ELEMENTS, CapturedGraph
from lowering.checks import keep_right
from lowering.dtypes import dtype_name
from lowering.graph_modules import graph_module_of
from lowering.importable import make_importable
from lowering.nodes import is_scalar, origin_of, write_call
from lowering.segments import Segment
from lowering.signature import NUMBERS, ScalarSpec, Signature, TensorSpec, inverse
from lowering.sizes import settled, size_hint
from lowering.source import SourceLine, user_line

aten = torch.ops.aten


@dataclass(frozen=True)
class Region:
    """A device region, ready to be lowered.

    Attributes:
        name: `region0`, `region1`, ...
        graph_module: inputs first, then the bound parameters, as placeholders; all contiguous. What
            the signature's checks find is its last output.
        inputs: nodes of the captured graph behind the inputs.
        parameters: nodes of the captured graph behind the bound parameters.
        parameter_names: what they are bound under: `p0`, `p1`, ... if nothing else was asked for,
            so that regions that only differ in the names of their weights are equal.
        outputs: nodes of the captured graph behind the outputs.
        signature: shapes, dtypes and layouts.
        ops: the names of its ops and the user's lines, in order, for errors and reports.
        given: the positions of the inputs that a call gives away: it may overwrite them.
    """

    name: str
    graph_module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    parameters: tuple[fx.Node, ...]
    parameter_names: tuple[str, ...]
    outputs: tuple[fx.Node, ...]
    signature: Signature
    ops: tuple[tuple[str, SourceLine], ...]
    given: tuple[int, ...] = ()


def extract_region(
    segment: Segment,
    bound: Collection[fx.Node],
    names: Mapping[fx.Node, str] | None = None,
    order: Sequence[fx.Node] = (),
    given: Collection[fx.Node] = (),
    is_checked: bool = True,
) -> Region:
    """Copy a device segment into a graph of its own.

    A tensor that crosses the boundary in another memory order than its dimensions' (channels-last,
    transposed) crosses as the permuted, dense tensor that its memory is, so that neither side
    copies it:

    Before: %y = relu(%x)                     with %x, %y channels-last, [1, 8, 4, 4]
    After:  %0 = permute(%x', [0, 3, 1, 2])   with %x' contiguous, [1, 4, 4, 8]
            %1 = relu(%0); return permute(%1, [0, 2, 3, 1])

    Args:
        segment: nodes to run on the device.
        bound: nodes (weights, constants) that are bound once instead of passed at each call.
        names: what each of them is bound under; by default `p0`, `p1`, ...
        order: which input, and which output, comes before which; by default as they are used.
        given: inputs that it may overwrite.
        is_checked: whether indices and divisors may be wrong (`lowering.checks`).
    """
    rank = {node: i for i, node in reversed([*enumerate(order)])}
    sources = sorted(segment.inputs, key=lambda n: rank.get(n, 0))
    outputs = tuple(sorted(segment.outputs, key=lambda n: rank.get(n, 0)))
    constants = [n for n in sources if n.op == "get_attr" and n not in bound]
    inputs = tuple(n for n in sources if n not in bound and n not in constants)
    parameters = tuple(n for n in sources if n in bound)
    graph = _copied((*inputs, *parameters), (*constants, *segment.nodes), outputs)
    checks = keep_right(graph) if is_checked else ()
    make_importable(graph)
    owner = segment.nodes[0].graph.owning_module
    signature = Signature(
        inputs=tuple(value_spec(n.meta["val"]) for n in inputs),
        parameters=tuple(tensor_spec(n.meta["val"]) for n in parameters),
        outputs=tuple(tensor_spec(n.meta["val"]) for n in outputs),
        checks=checks,
    )
    return Region(
        name=segment.name,
        graph_module=graph_module_of(owner, graph),
        inputs=inputs,
        parameters=parameters,
        parameter_names=tuple(
            parameter_name(i) if names is None else names[n] for i, n in enumerate(parameters)
        ),
        outputs=outputs,
        signature=signature,
        ops=tuple((str(n.target), user_line(n)) for n in segment.nodes),
        given=tuple(i for i, n in enumerate(inputs) if n in given),
    )


def bound_nodes(captured: CapturedGraph) -> frozenset[fx.Node]:
    """Give the nodes that regions bind once: weights, and constants too large for the IR."""
    constants = captured.constants.items()
    large = {n for n, tensor in constants if tensor.numel() > INLINE_CONSTANT_ELEMENTS}
    return captured.weights | large


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions from slowest to fastest if the tensor is dense, else 0, 1, 2, ...

    Sizes and strides may be symbolic; their hints decide.
    """
    sizes = [size_hint(s) for s in tensor.shape]
    strides = [size_hint(s) for s in tensor.stride()]
    natural = tuple(range(len(sizes)))
    for order in (natural, tuple(sorted(natural, key=lambda d: -strides[d]))):
        if _is_dense([sizes[d] for d in order], [strides[d] for d in order]):
            return order
    return natural


def _copied(
    taken: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.Graph:
    """Copy nodes into a graph that takes what crosses the boundary dense, and gives it so."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(taken):
        values[node] = _take(graph, f"a{i}", node)
    for node in nodes:
        values[node] = graph.node_copy(node, lambda n: _argument(n, values))
        values[node].meta = {**origin_of(node.meta), "val": settled(node.meta["val"])}
    graph.output([_give(graph, values[n], n) for n in outputs])
    for number in reversed([n for n in graph.nodes if is_scalar(n)]):
        if not number.users:  # the host computes sizes that are results
            graph.erase_node(number)
    return graph


def _take(graph: fx.Graph, name: str, source: fx.Node) -> fx.Node:
    placeholder = graph.placeholder(name)
    value = settled(source.meta["val"])
    placeholder.meta["val"] = value
    if not isinstance(value, torch.Tensor):
        return placeholder
    order = memory_order(value)
    if order == tuple(range(value.dim())):
        return placeholder
    placeholder.meta["val"] = value.permute(order)
    return write_call(graph, source, value, aten.permute.default, placeholder, list(inverse(order)))


def _argument(node: fx.Node, values: Mapping[fx.Node, fx.Node]) -> fx.node.Argument:
    value = node.meta.get("val")
    known = settled(value) if isinstance(value, torch.SymInt) else None
    return known if isinstance(known, int) else values[node]


def _give(graph: fx.Graph, node: fx.Node, source: fx.Node) -> fx.Node:
    value = settled(source.meta["val"])
    order = memory_order(value)
    if order == tuple(range(value.dim())):
        return node
    permuted = value.permute(order)
    return write_call(graph, source, permuted, aten.permute.default, node, list(order))


def value_spec(value: object) -> TensorSpec | ScalarSpec:
    """Say what a (fake) tensor or a (symbolic) number is to a signature."""
    if isinstance(value, torch.Tensor):
        return tensor_spec(value)
    for name, kind in NUMBERS.items():
        if isinstance(value, (kind, getattr(torch, f"Sym{kind.__name__.capitalize()}"))):
            return ScalarSpec(name)
    raise TypeError(f"a region cannot take {value!r}")


def tensor_spec(value: torch.Tensor) -> TensorSpec:
    """Say what a (fake) tensor is to a signature."""
    sizes = map(settled, value.shape)
    shape = tuple(s if isinstance(s, int) else str(s) for s in sizes)
    return TensorSpec(dtype_name(value.dtype), shape, memory_order(value))


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in sizes
        expected *= size
    return True

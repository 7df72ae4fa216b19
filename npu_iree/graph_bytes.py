"""A graph as bytes, for another process: with its fake values and the user's lines."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx._graph_pickler import GraphPickler, Options, _GraphUnpickler, _UnpickleState

from lowering.graph_modules import graph_module_of
from lowering.normalize import attribute

_SAVED = frozenset({"val", "original_aten", "stack_trace"})  # of what a node tells of itself


def graph_bytes(graph_module: fx.GraphModule) -> bytes:
    """Pickle a graph.

    Raises:
        Exception: whatever the objects in it raise.
    """
    with unset_fake_temporarily(), io.BytesIO() as stream:
        writer = _Writer(stream)
        nodes = list(graph_module.graph.nodes)
        names = {str(node.target) for node in nodes if node.op == "get_attr"}
        writer.dump({name: attribute(graph_module, name) for name in sorted(names)})
        writer.dump(len(nodes))
        for node in nodes:
            writer.dump_node(node)
        return zlib.compress(stream.getvalue(), level=1)


def graph_from_bytes(data: bytes, fake_mode: FakeTensorMode) -> fx.GraphModule:
    """Read what `graph_bytes` has written; reading runs code, so it must be of whom one trusts.

    Args:
        data: the bytes.
        fake_mode: of which the graph's fake values are to be.
    """
    with unset_fake_temporarily(), io.BytesIO(zlib.decompress(data)) as stream:
        reader = _Reader(stream, _UnpickleState(fake_mode))
        attributes: dict[str, Any] = reader.load()
        graph = fx.Graph()
        for _ in range(reader.load()):
            reader.load_node(graph)
        return graph_module_of(attributes, graph)


class _Writer(GraphPickler):
    """Writes nodes one after another; in the arguments of the next, they are their numbers.

    PyTorch's own way, all nodes in one object, takes four times as long to read: each argument is
    searched for nodes, and each fake value is made by way of a description of all that tensors
    may be.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, Options(None, _SAVED.__contains__))
        self._numbers: dict[fx.Node, int] = {}

    def dump_node(self, node: fx.Node) -> None:
        meta = {name: node.meta[name] for name in sorted(_SAVED & node.meta.keys())}
        self.dump((node.op, node.target, node.args, node.kwargs, node.name, node.type, meta))
        self._numbers[node] = len(self._numbers)

    def persistent_id(self, obj: object) -> Any:
        return self._numbers[obj] if isinstance(obj, fx.Node) else super().persistent_id(obj)

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, FakeTensor) and _is_plain(obj):
            layout = obj.dtype, tuple(obj.shape), obj.stride(), obj.storage_offset()
            return _value, (self._unpickle_state, *layout, obj.device, obj.requires_grad)
        return super().reducer_override(obj)


class _Reader(_GraphUnpickler):
    """Reads what `_Writer` has written."""

    def __init__(self, stream: io.BytesIO, state: _UnpickleState) -> None:
        super().__init__(stream, state)
        self._nodes: list[fx.Node] = []

    def load_node(self, graph: fx.Graph) -> None:
        *parts, meta = self.load()
        node = graph.create_node(*parts)
        node.meta = meta
        self._nodes.append(node)

    def persistent_load(self, pid: Any) -> object:
        return self._nodes[pid] if isinstance(pid, int) else super().persistent_load(pid)


def _is_plain(value: FakeTensor) -> bool:
    """Say whether a fake tensor is its layout, and no more."""
    return (
        type(value) is FakeTensor
        and value.layout is torch.strided
        and not (value.is_conj() or value.is_neg() or value.is_quantized)
        and value.constant is None
        and value.real_tensor is None
        and all(type(size) is int for size in _layout(value))
    )


def _layout(value: torch.Tensor) -> Iterator[int | torch.SymInt]:
    yield from value.shape
    yield from value.stride()
    yield value.storage_offset()


def _value(
    state: _UnpickleState,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    device: torch.device,
    requires_grad: bool,
) -> FakeTensor:
    """Make a fake tensor of a layout."""
    meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    if offset:
        extent = offset + meta.untyped_storage().nbytes() // dtype.itemsize
        whole = torch.empty(extent, dtype=dtype, device="meta")
        meta = whole.as_strided(shape, strides, offset)
    return FakeTensor(state.fake_mode, meta, device, requires_grad=requires_grad)

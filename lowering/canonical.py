"""The canonical text of a graph: equal for equal programs, different for different ones.

Names, symbols' names and source lines are left out; ops, wiring, attributes, dtypes, shapes and the
bytes of constants are in. It is the program's part of a cache key, and needs no compiler to make;
that of a whole captured graph is what a bundle knows the graph by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from lowering.dtypes import dtype_name
from lowering.nodes import STORAGE_OPS, is_one_of
from lowering.normalize import attribute
from lowering.tensor_digest import tensor_digest

_SYMBOL = re.compile(r"\b[a-z]+\d+\b")


def canonical_text(graph_module: fx.GraphModule, notes: Mapping[fx.Node, str] = {}) -> str:
    """Write a graph, one line a node.

    Args:
        graph_module: the graph.
        notes: what else is to be known of an input, at the end of its line.

    Example:
        %0 = input f32[s0,8]
        %1 = aten.relu.default(%0) -> f32[s0,8]
        return [%1]
    """
    symbols = _Symbols()
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    for node in graph_module.graph.nodes:
        if node.op == "output":
            lines.append(f"return {_text(node.args[0], names, symbols)}")
            continue
        names[node] = f"%{len(names)}"
        kind = _value_text(node.meta.get("val"), symbols)
        if node.op == "placeholder":
            line = f"input {kind}{notes.get(node, '')}"
        elif node.op == "get_attr":
            line = f"constant {_attribute_text(attribute(graph_module, str(node.target)))}"
        else:
            args = [_text(arg, names, symbols) for arg in node.args]
            args += [f"{k}={_text(v, names, symbols)}" for k, v in sorted(node.kwargs.items())]
            line = f"{_target_name(node.target)}({', '.join(args)}) -> {kind}"
            if is_one_of(node, STORAGE_OPS):
                line += f" of {_layout_text(node.args[0].meta['val'], symbols)}"
        lines.append(f"{names[node]} = {line}")
    return "\n".join(lines)


class _Symbols:
    """Renames symbolic sizes by the order in which they appear."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def rename(self, text: str) -> str:
        return _SYMBOL.sub(lambda m: self._names.setdefault(m[0], f"s{len(self._names)}"), text)


def _value_text(value: Any, symbols: _Symbols) -> str:
    if isinstance(value, torch.Tensor):
        sizes = ",".join(symbols.rename(str(size)) for size in value.shape)
        return f"{dtype_name(value.dtype)}[{sizes}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_value_text(v, symbols) for v in value)})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"{type(value).__name__}[{symbols.rename(str(value))}]"
    return type(value).__name__


def _layout_text(value: torch.Tensor, symbols: _Symbols) -> str:
    strides = ",".join(symbols.rename(str(stride)) for stride in value.stride())
    return f"strides {strides} from {symbols.rename(str(value.storage_offset()))}"


def _text(value: Any, names: dict[fx.Node, str], symbols: _Symbols) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(v, names, symbols) for v in value)}]"
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return symbols.rename(str(value))
    return f"{type(value).__name__}:{value}"


def _attribute_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _constant_text(value)
    if isinstance(value, fx.GraphModule):  # the body of a higher-order op
        return f"graph {canonical_text(value)!r}"
    return type(value).__name__


def _constant_text(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided:
        return f"{dtype_name(tensor.dtype)}{list(tensor.shape)} {tensor.layout}"
    sizes = ",".join(map(str, tensor.shape))
    return f"{dtype_name(tensor.dtype)}[{sizes}] {tensor_digest(tensor)}"


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"

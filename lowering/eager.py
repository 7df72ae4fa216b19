"""One call of eager mode as one region whose sizes may change: traced, with what it assumes.

A call is a function of tensors. Sizes other than 0 and 1 become symbols, each its own; what the
trace then assumes of them (two sizes are equal, one is even) are its conditions. A region serves
every call of the same dtypes, ranks and memory orders that meets them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from lowering.capabilities import Capabilities
from lowering.capture import CapturedGraph, capture_aot
from lowering.errors import HostOp
from lowering.expressions import Sizes, expression_of, value_of
from lowering.nodes import is_scalar
from lowering.partition import why_host
from lowering.region import Region, extract_region
from lowering.segments import DEVICE, Segment, with_own_sizes

Function = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
_THREAD = "npu-iree-trace"
_FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def _is_not_of_trace(entry: logging.LogRecord) -> bool:
    """Let PyTorch not report a trace that fails as an error: whoever asked for it has the host."""
    return entry.threadName != _THREAD


class NotTraceableError(Exception):
    """A call cannot be traced: its shapes depend on values, or PyTorch has no rule for it."""


@dataclass(frozen=True)
class Argument:
    """A tensor that goes in.

    Attributes:
        dtype: its dtype.
        shape: its sizes.
        strides: its strides; it is dense in some order of its dimensions.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """A tensor that comes out: its dtype, and its sizes and strides as Python expressions."""

    dtype: torch.dtype
    shape: tuple[str, ...]
    strides: tuple[str, ...]


@dataclass(frozen=True)
class OpGraph:
    """A traced call.

    Attributes:
        captured: the graph; one placeholder an argument.
        sizes: for each argument and dimension the symbol of its size, or the size if it is fixed.
        conditions: what was assumed of the symbols: a Python expression.
        results: what comes out.
    """

    captured: CapturedGraph
    sizes: tuple[tuple[str | int, ...], ...]
    conditions: str
    results: tuple[Result, ...]

    def bind(self, shapes: Sequence[Sequence[int]]) -> Sizes | None:
        """Return the value of each symbol, or None if the trace is not for these shapes."""
        values: dict[str, int] = {}
        for sizes, shape in zip(self.sizes, shapes, strict=True):
            for size, now in zip(sizes, shape, strict=True):
                if isinstance(size, str):
                    values[size] = now
                elif size != now:
                    return None
        return values if value_of(self.conditions, values) else None

    def host_ops(self, capabilities: Capabilities) -> list[HostOp]:
        """List what of it the target cannot run."""
        nodes = [n for n in self.captured.nodes if not is_scalar(n)]
        return list(why_host(nodes, capabilities).values())

    def region(self, name: str, *, is_checked: bool = True) -> Region | None:
        """Extract all of it as one region; None if it computes nothing.

        Args:
            name: of the region.
            is_checked: whether the indices that it takes may be wrong.
        """
        nodes = self.captured.nodes
        scalars = [n for n in nodes if is_scalar(n)]
        segment = Segment(DEVICE, [n for n in nodes if not is_scalar(n)], name)
        if not segment.nodes:
            return None
        results = [o for o in self.captured.outputs if isinstance(o, fx.Node)]
        order = [*dict.fromkeys(results)]
        segment = with_own_sizes(segment, scalars)
        return extract_region(segment, (), order=order, is_checked=is_checked)


def trace(
    function: Function,
    arguments: Sequence[Argument],
    table: Mapping[Any, Callable[..., Any]],
    *,
    is_dynamic: bool = True,
) -> OpGraph:
    """Trace a call.

    Args:
        function: what to trace; takes and returns lists of tensors, and changes none of them.
        arguments: what its tensors are.
        table: decompositions.
        is_dynamic: whether sizes other than 0 and 1 become symbols.

    Raises:
        NotTraceableError: it cannot be traced.
    """
    answer: list[OpGraph] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            answer.append(_trace(function, arguments, table, is_dynamic))
        except Exception as error:  # whatever PyTorch raises: the caller has the host
            failure.append(error)

    _FAKE_TENSOR_LOG.addFilter(_is_not_of_trace)
    # A thread of its own has none of the caller's modes: autocast, tracing, excluded keys.
    thread = Thread(target=run, name=_THREAD)
    with compile_lock:  # tracing patches PyTorch's modules: one at a time, and not beside Dynamo
        thread.start()
        thread.join()
    if failure:
        error = failure[0]
        text = str(error).strip().splitlines() or [""]
        raise NotTraceableError(f"{type(error).__name__}: {text[0][:300]}") from error
    return answer[0]


def _trace(
    function: Function,
    arguments: Sequence[Argument],
    table: Mapping[Any, Callable[..., Any]],
    is_dynamic: bool,
) -> OpGraph:
    environment = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=environment)
    fakes = [_fake(mode, i, a, is_dynamic) for i, a in enumerate(arguments)]
    sizes = tuple(tuple(_symbol(size) for size in fake.shape) for fake in fakes)
    functional = torch.func.functionalize(lambda *tensors: tuple(function(tensors)))
    with mode, torch.no_grad(), enable_python_dispatcher():
        expected = [_materialized(t) for t in function(fakes)]
        graph = make_fx(functional, decomposition_table=dict(table))(*fakes)
    _lay_out(graph.graph, expected)
    captured = capture_aot(graph)
    guards = [expression_of(g.expr) for g in environment.guards]
    return OpGraph(
        captured=captured,
        sizes=sizes,
        conditions=" and ".join(f"({g})" for g in dict.fromkeys(guards)) or "True",
        results=tuple(
            Result(
                t.dtype, tuple(map(expression_of, t.shape)), tuple(map(expression_of, t.stride()))
            )
            for t in expected
        ),
    )


def _fake(mode: FakeTensorMode, index: int, argument: Argument, is_dynamic: bool) -> torch.Tensor:
    real = torch.empty_strided(argument.shape, argument.strides, dtype=argument.dtype)
    kind = DimDynamic.DYNAMIC if is_dynamic else DimDynamic.STATIC
    context: Any = StatelessSymbolicContext(dynamic_sizes=[kind] * real.dim())
    source = ConstantSource(f"argument{index}")
    return mode.from_tensor(real, symbolic_context=context, source=source)


def _materialized(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise NotTraceableError("a result is no tensor")
    if any(_has_unknown(size) for size in tensor.shape):
        raise NotTraceableError("its shape depends on values")
    return tensor if _is_dense(tensor) else torch.empty_like(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch._prims_common.is_non_overlapping_and_dense_or_false(tensor))


def _has_unknown(size: int | torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.has_hint()


def _lay_out(graph: fx.Graph, expected: Sequence[torch.Tensor]) -> None:
    """Let each result be a value of its own, in the memory order that eager gives it."""
    output = graph.output_node()
    results = []
    taken: set[fx.Node] = set()
    for value, tensor in zip(output.args[0], expected, strict=True):  # type: ignore[arg-type]
        if not isinstance(value, fx.Node) or value.op != "call_function" or value in taken:
            with graph.inserting_before(output):
                value = graph.call_function(torch.ops.aten.clone.default, (value,))
        taken.add(value)
        value.meta["val"] = tensor
        results.append(value)
    output.args = (results,)


def _symbol(size: int | torch.SymInt) -> str | int:
    return size if isinstance(size, int) else str(size.node._expr)

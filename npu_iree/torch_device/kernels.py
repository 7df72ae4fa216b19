"""Kernels of eager mode: a call's graph through the pipeline, loaded, and found again by shape."""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import counters

from lowering.abi import ENTRY
from lowering.artifact import Artifact, EntryPoint
from lowering.cache import Entry
from lowering.compiler import Compiler
from lowering.decompositions import decomposition_table
from lowering.denials import Denial
from lowering.dtypes import DTYPE_NAMES
from lowering.eager import (
    Argument,
    Function,
    NotTraceableError,
    OpGraph,
    trace,
)
from lowering.effort import Effort
from lowering.expressions import Sizes, expression_of, value_of
from lowering.heal import refuses_everything
from lowering.region import Region
from lowering.signature import ScalarSpec, TensorSpec
from npu_iree.errors import HostOp
from npu_iree.executable import Executable
from npu_iree.function import INLINE_EFFORT
from npu_iree.function import Function as DeviceFunction
from npu_iree.options import Options
from npu_iree.toolchain import compiler_for
from npu_iree.torch_device.calls import Computation, Results
from npu_iree.torch_device.current import device
from npu_iree.torch_device.kept import Kept

log = logging.getLogger(__name__)
_LOCK = threading.Lock()
_NUMBERS = itertools.count()
_MOST_KERNELS = 256  # of one family; the disk has the others
_KEPT_BOUNDS = 1024  # of one kernel; a shape that is forgotten is worked out again


class NoKernelError(Exception):
    """There is no kernel for a call, and why."""


@dataclass(frozen=True)
class Output:
    """A result of one call: sizes and strides as they are now."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Bound:
    """A kernel for arguments of known shapes.

    Attributes:
        function: what to call.
        is_small: whether the call may run on the calling thread.
        takes: for each argument of the function which tensor of the call it is, or a number that
            it takes by value.
        stored: the shape in memory of each of those tensors; None for a number.
        outputs: what comes out, in the order of the call's results.
        order: where each result is among those of the function.
    """

    function: DeviceFunction
    is_small: bool
    takes: tuple[Any, ...]
    stored: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[Output, ...]
    order: tuple[int, ...]


class Kernel:
    """A compiled call, for all shapes that meet its conditions."""

    def __init__(self, graph: OpGraph, region: Region, function: DeviceFunction) -> None:
        self.graph = graph
        self._function = function
        self._effort = Effort.of(region)
        self._bounds: Kept[tuple[tuple[int, ...], ...], Bound | None] = Kept(_KEPT_BOUNDS)
        positions = {node: i for i, node in enumerate(graph.captured.inputs)}
        self._takes = [
            (positions.get(node), spec, _expression(spec, node.meta["val"]))
            for node, spec in zip(region.inputs, region.signature.inputs, strict=True)
        ]
        self._order = tuple(region.outputs.index(o) for o in graph.captured.outputs)

    def bind(self, arguments: Sequence[Argument]) -> Bound | None:
        """Return the kernel for these arguments, or None if it is not for their shapes."""
        shapes = tuple([a.shape for a in arguments])
        if shapes not in self._bounds:
            self._bounds[shapes] = self._bind(shapes)
        return self._bounds[shapes]

    def _bind(self, shapes: Sequence[tuple[int, ...]]) -> Bound | None:
        sizes = self.graph.bind(shapes)
        if sizes is None:
            return None
        takes: list[Any] = []
        stored: list[tuple[int, ...] | None] = []
        for position, spec, expression in self._takes:
            if isinstance(spec, TensorSpec) and position is not None:
                takes.append(position)
                stored.append(tuple(shapes[position][d] for d in spec.order))
            else:
                takes.append(value_of(expression, sizes))
                stored.append(None)
        outputs = tuple(_output(r.dtype, r.shape, r.strides, sizes) for r in self.graph.results)
        return Bound(
            function=self._function,
            is_small=self._effort.bound(sizes) <= INLINE_EFFORT,
            takes=tuple(takes),
            stored=tuple(stored),
            outputs=outputs,
            order=self._order,
        )


def _output(
    dtype: torch.dtype, shape: Sequence[str], strides: Sequence[str], sizes: Sizes
) -> Output:
    now = tuple(int(value_of(s, sizes)) for s in shape)
    nbytes = dtype.itemsize
    for size in now:
        nbytes *= size
    return Output(dtype, now, tuple(int(value_of(s, sizes)) for s in strides), nbytes)


def _expression(spec: TensorSpec | ScalarSpec, value: object) -> str:
    return "" if isinstance(spec, TensorSpec) else expression_of(value)


@dataclass
class Family:
    """The kernels of one call of one op: same dtypes, ranks, memory orders and constants.

    Attributes:
        name: of the op.
        is_ours: our own code, of which we know that it is right whatever the capability table says
            of its ops.
        kernels: those that are loaded, the last used first.
        refused: why there are no more.
        results: how the results of an op's call come; None before a kernel has been made.
    """

    name: str
    is_ours: bool = False
    kernels: list[Kernel] = field(default_factory=list)
    refused: str = ""
    results: Results | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def bind(self, function: Function, arguments: Sequence[Argument], is_dynamic: bool) -> Bound:
        """Find or make the kernel for a call.

        Args:
            function: what the call computes, on lists of tensors.
            arguments: what its tensors are.
            is_dynamic: whether one kernel is to serve all sizes.

        Raises:
            NoKernelError: the call cannot be compiled for the device.
        """
        with self.lock:
            for i, kernel in enumerate(self.kernels):
                if bound := kernel.bind(arguments):
                    self.kernels.insert(0, self.kernels.pop(i))
                    return bound
            if self.refused:
                raise NoKernelError(self.refused)
            kernel = self._make(function, arguments, is_dynamic)
            bound = kernel.bind(arguments)
            if bound is None:
                raise NoKernelError("what its trace assumes is not so")
            self.kernels[_MOST_KERNELS - 1 :] = []  # the least recently used
            self.kernels.insert(0, kernel)
            if isinstance(function, Computation):
                self.results = function.results
            return bound

    def _make(self, function: Function, arguments: Sequence[Argument], is_dynamic: bool) -> Kernel:
        reasons: list[str] = []
        for dynamic in (True, False) if is_dynamic else (False,):
            try:
                return make_kernel(
                    self.name, function, arguments, is_dynamic=dynamic, is_ours=self.is_ours
                )
            except NoKernelError as error:
                reasons.append(str(error))
                is_of_call = isinstance(error.__cause__, NotTraceableError)
        if is_dynamic and not is_of_call:  # else other sizes may do: these may be the user's error
            self.refused = reasons[0]
        raise NoKernelError(reasons[0])


_FAMILIES: Kept[tuple[object, ...], Family] = Kept(4096)  # loaded; the disk has the others


def family(key: tuple[object, ...], name: str, *, is_ours: bool = False) -> Family:
    """Return the kernels of a key."""
    with _LOCK:
        if key not in _FAMILIES:
            _FAMILIES[key] = Family(name, is_ours)
        _FAMILIES.move_to_end(key)
        return _FAMILIES[key]


def make_kernel(
    name: str, function: Function, arguments: Sequence[Argument], *, is_dynamic: bool, is_ours: bool
) -> Kernel:
    """Trace a call, get its module from the cache or the compiler, and load it.

    Raises:
        NoKernelError: the target cannot run it, or the compiler refused it.
    """
    target = device().target
    try:
        graph = trace(
            function, arguments, decomposition_table(target.compile.keep_ops), is_dynamic=is_dynamic
        )
    except NotTraceableError as error:
        raise NoKernelError(str(error)) from error
    for dtype in (*(a.dtype for a in arguments), *(r.dtype for r in graph.results)):
        if dtype not in DTYPE_NAMES:
            raise NoKernelError(f"no device buffer holds {dtype}")
    counts: Counter[str] = Counter()
    folder = f"eager/{next(_NUMBERS)}"
    compiler = compiler_for(Options(target=target.name), folder, counts)
    host_ops = [] if is_ours else graph.host_ops(compiler.capabilities)
    if host_ops:
        raise NoKernelError(_why(host_ops[0], name))
    region = graph.region(re.sub(r"\W+", "_", name), is_checked=not is_ours)
    if region is None:
        raise NoKernelError("it computes nothing")
    try:
        entry = _entry(compiler, region, name)
    finally:
        counters["npu_iree"].update(counts)
    artifact = Artifact(name, entry.vmfb, {ENTRY: EntryPoint(region.signature)}, entry.flags)
    executable = Executable(device(), artifact)
    return Kernel(graph, region, executable.functions[ENTRY])


def _why(host_op: HostOp, name: str) -> str:
    """Say why a call is not for the device; of which op, where it is another one of its trace."""
    packets = {op.rpartition(".")[0] for op in (host_op.op, name)}
    return host_op.reason if len(packets) == 1 else f"{host_op.op}: {host_op.reason}"


def _entry(compiler: Compiler, region: Region, name: str) -> Entry:
    digest = compiler.builder.key(region).digest
    limits = compiler.builder.limits
    known = compiler.denials.under(limits) if compiler.denials is not None else {}
    if digest in known:
        raise NoKernelError(f"{known[digest].reason} (found before)")
    built = compiler.builder.build([region])[region.name]
    if isinstance(built, Entry):
        return built
    if built is None:
        raise NoKernelError("it may not be compiled")
    denial = Denial(
        program=digest,
        op=name,
        target=device().target.name,
        reason=built.summary,
        limits=limits,
    )
    denials = None if built.is_passing else compiler.denials
    if denials is not None and not refuses_everything(compiler.builder):
        denials.add([denial])
    raise NoKernelError(built.summary)

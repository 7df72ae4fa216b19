"""The `torch.compile` entry point: graphs in, runners out."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lowering.build import Builder
from lowering.cache import ArtifactCache
from lowering.capabilities import load_capabilities
from lowering.capture import CapturedGraph, capture_aot
from lowering.compiler import Compiler
from lowering.decompositions import decomposition_table
from lowering.denials import DenialRecord
from lowering.pipeline import Toolchain
from lowering.service import CompileService, Limits
from npu_iree.cause import Cause
from npu_iree.device import open_device
from npu_iree.errors import OptionError
from npu_iree.executable import Executable
from npu_iree.frozen import can_freeze
from npu_iree.options import Options
from npu_iree.report import CompileReport, tell
from npu_iree.runner import Runner
from npu_iree.settings import Settings
from npu_iree.versions import check_versions

_GRAPH_NUMBERS = itertools.count()


def npu_iree(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's: what `torch.compile(model, backend="npu_iree")` calls.

    Args:
        graph_module: the captured graph.
        example_inputs: its inputs, for shapes and dtypes.
        options: see `npu_iree.Options`.
        mode: not used; PyTorch's modes belong to Inductor.

    Raises:
        OptionError: an option does not exist or has a bad value.
        UnsupportedOpError: `fallback="error"`, and the target cannot run some ops.
        VersionError: other versions of torch, torch-mlir or IREE are installed.
    """
    parsed = Options.parse(options)
    if mode is not None:
        raise OptionError(f"mode={mode!r} belongs to Inductor; npu_iree takes options={{...}}")
    check_versions("torch", "torch-mlir", "iree-base-compiler", "iree-base-runtime")
    compile_aot = functools.partial(_compile_aot, parsed, _Source.of(graph_module, example_inputs))
    backend = aot_autograd(
        fw_compiler=functools.partial(compile_aot, part="forward"),
        bw_compiler=functools.partial(compile_aot, part="backward"),
        inference_compiler=functools.partial(compile_aot, part="inference"),
        decompositions=decomposition_table(
            parsed.keep_ops | parsed.target_value.compile.keep_ops, parsed.decompositions
        ),
    )
    compiled: Callable[..., Any] = backend(graph_module, example_inputs)
    return compiled


@dataclass(frozen=True)
class _Source:
    """Dynamo's side of a graph: AOTAutograd keeps the order of inputs, not names nor tensors.

    The cause is known while Dynamo compiles; a backward graph may be compiled at its first use.
    """

    inputs: tuple[Any, ...]
    names: tuple[str, ...]
    cause: Cause

    @classmethod
    def of(cls, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> _Source:
        return cls(tuple(inputs), input_names(graph_module), Cause.now())


def input_names(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """Return what the user would call the inputs of a graph of Dynamo's: `x`, `self_weight`."""
    nodes = graph_module.graph.find_nodes(op="placeholder")
    return tuple(n.name.removeprefix("l_").strip("_") for n in nodes)


def compiler_for(options: Options, number: int = 0, counts: Counter[str] | None = None) -> Compiler:
    """Return what plans and compiles graphs under these options.

    Args:
        options: of one `torch.compile` call.
        number: of the graph, for the names of its dumps.
        counts: what it does is added up here.
    """
    settings, target = Settings.read(), options.target_value
    limits = Limits(
        time_s=options.compile_time_limit_s, memory_bytes=options.compile_memory_limit_bytes
    )
    cache = _open_cache(settings.cache, settings.cache_limit_bytes) if settings.cache else None
    builder = Builder(
        target=target.compile,
        toolchain=Toolchain(
            service=compile_service(), limits=limits, flags=options.flags, fault=settings.fault
        ),
        cache=cache,
        dump=settings.dump / f"graph{number}" if settings.dump else None,
        counts=Counter() if counts is None else counts,
    )
    return Compiler(
        builder=builder,
        capabilities=load_capabilities(target.compile.capabilities),
        forbid_host=options.fallback == "error",
        disabled_ops=options.disabled_ops,
        denials=DenialRecord(settings.cache / "denials.json") if settings.cache else None,
    )


@functools.cache
def _open_cache(folder: Path, limit_bytes: int) -> ArtifactCache:
    """Return the cache in a folder, the same one each time: it complains once."""
    return ArtifactCache(folder, limit_bytes)


@functools.cache
def compile_service() -> CompileService:
    """Return the process's pool of compile workers; none is started before it is needed."""
    service = CompileService(size=max(1, min(4, os.cpu_count() or 1)))
    atexit.register(service.close)
    return service


def compile_graph(
    captured: CapturedGraph,
    options: Options,
    cause: Cause | None = None,
    part: str = "inference",
) -> Runner:
    """Plan a captured graph, compile its regions, and load them.

    Args:
        captured: the graph.
        options: of the `torch.compile` call.
        cause: why it is compiled, for the report.
        part: `forward`, `backward` or `inference`, for the report.

    Raises:
        UnsupportedOpError: `fallback="error"`, and the target cannot run some ops.
        StageError: `fallback="error"`, and the compiler refused a region.
        TargetError: the target's device cannot be opened here.
        WorkerStartError: there are no workers to compile in.
    """
    number, started = next(_GRAPH_NUMBERS), time.perf_counter()
    counts: Counter[str] = Counter()
    try:
        compiled = compiler_for(options, number, counts).compile(captured)
    finally:
        counters["npu_iree"].update(counts)
    device = open_device(options.target_value)
    executables = {
        name: Executable(device, artifact) for name, artifact in compiled.artifacts.items()
    }
    constants = {node.name: tensor for node, tensor in captured.constants.items()}
    report = CompileReport(
        graph=number,
        part=part,
        target=options.target_value.name,
        cause=cause or Cause.now(),
        regions=len(compiled.plan.regions),
        host_ops=len(compiled.plan.host_ops),
        counts=dict(counts),
        ms=round((time.perf_counter() - started) * 1e3),
    )
    tell(report, compiled.plan)
    return Runner(compiled.plan, device, executables, constants)


def _compile_aot(
    options: Options,
    source: _Source,
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    part: str,
) -> Callable[..., Any]:
    """Compile a graph of AOTAutograd's into what it calls: a list of arguments in, a list out."""
    is_same = part == "inference" and len(source.inputs) == len(inputs)
    weights = _bindable_weights(source.inputs) if is_same and options.bind_weights else ()
    captured = capture_aot(graph_module, weights, source.names if is_same else ())
    with unset_fake_temporarily():  # AOTAutograd calls us inside its fake tensor mode
        runner = compile_graph(captured, options, source.cause, part)

    def run(args: list[Any]) -> list[Any]:
        results = runner(*args)
        args.clear()
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _bindable_weights(inputs: Sequence[Any]) -> Sequence[int]:
    """Positions of the inputs that keep their identity, are not written to, and can be watched."""
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return []
    metadata = context.fw_metadata
    mutated = set(metadata.mutated_inp_runtime_indices)
    return [
        i
        for i in metadata.static_input_indices
        if i not in mutated and isinstance(inputs[i], torch.Tensor) and can_freeze(inputs[i])
    ]

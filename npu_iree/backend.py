"""The `torch.compile` entry point: graphs in, runners out."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._guards import CompileContext, TracingContext
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lowering.build import Builder
from lowering.cache import ArtifactCache
from lowering.capabilities import load_capabilities
from lowering.capture import CapturedGraph, capture_aot
from lowering.compiler import Compiler
from lowering.decompositions import decomposition_table
from lowering.denials import DenialRecord
from lowering.pipeline import Toolchain
from lowering.plan import Plan
from lowering.service import CompileService, Limits
from npu_iree.device import open_device
from npu_iree.errors import OptionError
from npu_iree.executable import Executable
from npu_iree.frozen import can_freeze
from npu_iree.options import Options
from npu_iree.runner import Runner
from npu_iree.settings import Settings
from npu_iree.versions import check_versions

log = logging.getLogger(__name__)

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
        fw_compiler=functools.partial(compile_aot, is_inference=False),
        bw_compiler=functools.partial(compile_aot, is_inference=False),
        inference_compiler=functools.partial(compile_aot, is_inference=True),
        decompositions=decomposition_table(
            parsed.keep_ops | parsed.target_value.compile.keep_ops, parsed.decompositions
        ),
    )
    compiled: Callable[..., Any] = backend(graph_module, example_inputs)
    return compiled


@dataclass(frozen=True)
class _Source:
    """Dynamo's side of a graph: AOTAutograd keeps the order of inputs, not names nor tensors."""

    inputs: tuple[Any, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> _Source:
        return cls(tuple(inputs), input_names(graph_module))


def input_names(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """Return what the user would call the inputs of a graph of Dynamo's: `x`, `self_weight`."""
    nodes = graph_module.graph.find_nodes(op="placeholder")
    return tuple(n.name.removeprefix("l_").strip("_") for n in nodes)


def compiler_for(options: Options, number: int = 0) -> Compiler:
    """Return what plans and compiles graphs under these options.

    Args:
        options: of one `torch.compile` call.
        number: of the graph, for the names of its dumps.
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
        counts=counters["npu_iree"],
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


def compile_graph(captured: CapturedGraph, options: Options) -> Runner:
    """Plan a captured graph, compile its regions, and load them.

    Raises:
        UnsupportedOpError: `fallback="error"`, and the target cannot run some ops.
        StageError: `fallback="error"`, and the compiler refused a region.
        TargetError: the target's device cannot be opened here.
    """
    number = next(_GRAPH_NUMBERS)
    compiled = compiler_for(options, number).compile(captured)
    device = open_device(options.target_value)
    executables = {
        name: Executable(device, artifact) for name, artifact in compiled.artifacts.items()
    }
    constants = {node.name: tensor for node, tensor in captured.constants.items()}
    _report(number, compiled.plan)
    return Runner(compiled.plan, device, executables, constants)


def _compile_aot(
    options: Options,
    source: _Source,
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    is_inference: bool,
) -> Callable[..., Any]:
    """Compile a graph of AOTAutograd's into what it calls: a list of arguments in, a list out."""
    is_same = is_inference and len(source.inputs) == len(inputs)
    weights = _bindable_weights(source.inputs) if is_same and options.bind_weights else ()
    captured = capture_aot(graph_module, weights, source.names if is_same else ())
    with unset_fake_temporarily():  # AOTAutograd calls us inside its fake tensor mode
        runner = compile_graph(captured, options)

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


def _report(number: int, plan: Plan) -> None:
    counters["npu_iree"]["graphs"] += 1
    counters["npu_iree"]["regions"] += len(plan.regions)
    counters["npu_iree"]["host_ops"] += len(plan.host_ops)
    if unsupported := [op for op in plan.host_ops if op.kind == "unsupported"]:
        listed = "\n  ".join(map(str, unsupported))
        log.warning("graph %d: %d ops run on the host:\n  %s", number, len(unsupported), listed)
    log.info("graph %d: compiled for %s", number, _cause())
    log.debug("graph %d: plan:\n%s", number, plan)


def _cause() -> str:
    """Say why Dynamo asked for a graph."""
    identity = CompileContext.current_compile_id()
    count = identity.frame_compile_id if identity is not None else 0
    if not count:
        return "a first call"
    return f"recompile {count} of the function: a guard failed (TORCH_LOGS=recompiles says which)"

"""The `torch.compile` entry point: graphs in, runners out."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
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
from lowering.bundle import Bundle, Origin
from lowering.cache import ArtifactCache
from lowering.capabilities import load_capabilities
from lowering.capture import CapturedGraph, capture_aot
from lowering.compiler import Compiler
from lowering.decompositions import decomposition_table
from lowering.denials import DenialRecord
from lowering.key import host_cpu, package_version
from lowering.pipeline import Toolchain
from lowering.service import CompileService, Limits
from npu_iree import __version__, bundles
from npu_iree.cause import Cause
from npu_iree.device import open_device
from npu_iree.errors import ArtifactError, NotCompiledError, OptionError
from npu_iree.executable import Executable
from npu_iree.frozen import can_freeze
from npu_iree.options import Options
from npu_iree.report import CompileReport, tell
from npu_iree.runner import Runner
from npu_iree.settings import Settings
from npu_iree.versions import VERIFIED, check_versions

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
        ArtifactError: the bundle is damaged, or is not for this target or CPU.
        NotCompiledError: `compile="never"`, and neither the bundle nor the cache has the graph.
    """
    parsed = Options.parse(options)
    if mode is not None:
        raise OptionError(f"mode={mode!r} belongs to Inductor; npu_iree takes options={{...}}")
    compilers = ("torch-mlir", "iree-base-compiler") if parsed.compile == "if_missing" else ()
    check_versions("torch", *compilers, "iree-base-runtime")
    source = _Source.of(graph_module, example_inputs)
    compile_aot = functools.partial(_compile_aot, parsed, source)
    backend = aot_autograd(
        fw_compiler=functools.partial(compile_aot, kind="forward"),
        bw_compiler=functools.partial(compile_aot, kind="backward"),
        inference_compiler=functools.partial(compile_aot, kind="inference"),
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
    caller: bundles.Caller | None
    cause: Cause

    @classmethod
    def of(cls, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> _Source:
        names = input_names(graph_module)
        return cls(tuple(inputs), names, bundles.caller(), Cause.now())


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
    if cache is None and options.bundle is None and options.compile != "if_missing":
        raise OptionError(
            f"compile={options.compile!r} takes what was compiled before, and there is no bundle "
            "and no cache (NPU_IREE_CACHE is off)"
        )
    builder = Builder(
        target=target.compile,
        toolchain=Toolchain(
            service=compile_service(), limits=limits, flags=options.flags, fault=settings.fault
        ),
        bundle=open_bundle(options.bundle, target.name) if options.bundle else None,
        cache=cache,
        may_compile=options.compile == "if_missing",
        dump=settings.dump / f"graph{number}" if settings.dump else None,
        counts=Counter() if counts is None else counts,
    )
    capabilities = load_capabilities(target.compile.capabilities)
    return Compiler(
        builder=builder,
        capabilities=capabilities,
        forbid_host=options.fallback == "error",
        disabled_ops=options.disabled_ops,
        denials=DenialRecord(settings.cache / "denials.json") if settings.cache else None,
        origin=Origin(
            versions={
                "npu-iree": __version__,
                **{name: package_version(name) for name in VERIFIED},
            },
            target=target.name,
            cpu=host_cpu(),
            capabilities=capabilities.digest,
            options=options.printable(),
        ),
    )


def open_bundle(path: Path, target: str) -> Bundle:
    """Open a bundle to be used for a target on this machine; one that is open is not read again.

    Raises:
        ArtifactError: it is damaged, of another format, or for another target or CPU.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ArtifactError(path, error.strerror or str(error)) from error
    bundle = _read_bundle(path, (status.st_ino, status.st_mtime_ns, status.st_size))
    bundle.refuse_unless_for(target, host_cpu())
    return bundle


@functools.lru_cache(maxsize=16)
def _read_bundle(path: Path, version: tuple[int, ...]) -> Bundle:
    return Bundle(path)


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
    caller: bundles.Caller | None = None,
) -> Runner:
    """Plan a captured graph, compile its regions, and load them.

    Args:
        captured: the graph.
        options: of the `torch.compile` call.
        cause: why it is compiled, for the report.
        caller: the `torch.compile` call, for `save_bundle`.

    Raises:
        UnsupportedOpError: `fallback="error"`, and the target cannot run some ops.
        StageError: `fallback="error"`, and the compiler refused a region.
        TargetError: the target's device cannot be opened here.
        NotCompiledError: it would have to be compiled, and may not be.
        WorkerStartError: there are no workers to compile in.
    """
    number, started = next(_GRAPH_NUMBERS), time.perf_counter()
    counts: Counter[str] = Counter()
    compiler = compiler_for(options, number, counts)
    try:
        compiled = compiler.compile(captured)
    finally:
        counters["npu_iree"].update(counts)
    device = open_device(options.target_value)
    executables = {
        name: Executable(device, artifact) for name, artifact in compiled.artifacts.items()
    }
    constants = {node.name: tensor for node, tensor in captured.constants.items()}
    report = CompileReport(
        graph=number,
        part=captured.kind,
        target=options.target_value.name,
        cause=cause or Cause.now(),
        regions=len(compiled.plan.regions),
        host_ops=len(compiled.plan.host_ops),
        counts=dict(counts),
        ms=round((time.perf_counter() - started) * 1e3),
    )
    tell(report, compiled.plan)
    runner = Runner(compiled.plan, device, executables, constants)
    if caller is not None and compiler.origin is not None:
        bundles.remember(runner, caller, compiler.origin, compiled.built)
    return runner


def _compile_aot(
    options: Options,
    source: _Source,
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    kind: str,
) -> Callable[..., Any]:
    """Compile a graph of AOTAutograd's into what it calls: a list of arguments in, a list out."""
    is_same = kind == "inference" and len(source.inputs) == len(inputs)
    weights = _bindable_weights(source.inputs) if is_same and options.bind_weights else ()
    captured = capture_aot(graph_module, weights, source.names if is_same else (), kind)
    runner: Callable[..., Any]
    with unset_fake_temporarily():  # AOTAutograd calls us inside its fake tensor mode
        try:
            runner = compile_graph(captured, options, source.cause, source.caller)
        except NotCompiledError as error:
            if options.compile != "eager":
                raise
            log.warning("a graph runs on PyTorch's CPU kernels, as compile='eager' says: %s", error)
            captured.graph_module.recompile()
            runner = captured.graph_module

    def run(args: list[Any]) -> list[Any]:
        results = list(runner(*args))
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

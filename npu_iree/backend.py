"""The `torch.compile` entry point: graphs in, runners out."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from npu_iree import bundles
from npu_iree.aliasing import OTHER_ALIASES, Aliases
from npu_iree.aot import allow_second_backward, aot_backend, metadata, needs_no_wrapper
from npu_iree.aot_graph import AotGraph
from npu_iree.cause import Cause
from npu_iree.donation import NOTHING, Donated, donated_inputs, refuse_what_lives_on
from npu_iree.errors import EagerOnlyError, OptionError
from npu_iree.frozen import can_freeze
from npu_iree.options import Options
from npu_iree.precompiled import is_precompiling, precompiled
from npu_iree.returned_views import views_of_arguments
from npu_iree.runner import Runner
from npu_iree.shared_graph import SharedGraph
from npu_iree.torch_device import graphs
from npu_iree.torch_device.current import is_on_npu
from npu_iree.transforms import teller, without_tangents
from npu_iree.versions import check_versions
from npu_iree.workers import compile_service

log = logging.getLogger(__name__)


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
        mode: None; PyTorch's modes belong to Inductor.

    Raises:
        OptionError: an option does not exist or has a bad value, or `mode` is given.
        UnsupportedOpError: `fallback="error"`, and the target cannot run some ops.
        EagerOnlyError: `fallback="error"`, and only PyTorch's own kernels can run the graph.
        VersionError: other versions of torch, torch-mlir or IREE are installed.
        ArtifactError: the bundle is damaged, or is not for this target or CPU.
        NotCompiledError: `compile="never"`, and neither the bundle nor the cache has the graph.
    """
    on_npu = any(map(is_on_npu, example_inputs))
    parsed = graphs.options_on_npu(options) if on_npu else Options.parse(options)
    if mode is not None:
        raise OptionError(f"mode={mode!r} belongs to Inductor; npu_iree takes options={{...}}")
    compilers = ("torch-mlir", "iree-base-compiler") if parsed.compile == "if_missing" else ()
    check_versions("torch", *compilers, "iree-base-runtime")
    source = Source.of(graph_module, example_inputs, parsed)
    try:
        return _compiled(graph_module, source, parsed)
    except EagerOnlyError as error:
        if parsed.fallback == "error":
            raise
        log.warning("a graph runs in eager: %s", error)
        return graph_module
    finally:
        source.inputs.clear()  # what compiles a backward pass later holds no tensors of the user's


def _compiled(graph_module: fx.GraphModule, source: Source, options: Options) -> Callable[..., Any]:
    """Compile a graph, and return what Dynamo calls."""
    compile_aot = functools.partial(_compile_aot, options, source)
    backend = aot_backend(options, compile_aot, functools.partial(_start_worker, options))
    compiled: Callable[..., Any] = backend(graph_module, list(source.inputs))
    runner = source.inferred[-1] if source.inferred else None
    if runner is not None and needs_no_wrapper(runner.plan, graph_module, source.inputs):
        return without_tangents(runner.run, graph_module, options.fallback)
    if is_precompiling():
        return compiled
    guarded = _guarded(compiled, graph_module, source, options)
    return without_tangents(lambda args: guarded(*args), graph_module, options.fallback)


def _start_worker(options: Options) -> None:
    """Have what will compile a new graph come up while that is traced."""
    if options.compile == "if_missing" and options.bundle is None:
        compile_service().start_ahead()


def _guarded(
    compiled: Callable[..., Any], graph_module: fx.GraphModule, source: Source, options: Options
) -> Callable[..., Any]:
    """Run a graph in eager where its arguments share memory as it was not compiled for.

    And where it writes to tensors of `inference_mode` outside of it, which eager refuses.
    """
    aliases, tell = source.aliases(), teller(options.fallback)
    if aliases is None:
        return compiled

    is_asked = not _goes_into_inference_mode(graph_module)

    def run(*args: Any) -> Any:
        if is_asked and aliases.may_not_be_written(args):
            return graph_module(*args)  # which raises
        if aliases.are_as_compiled(args):
            return compiled(*args)
        tell(OTHER_ALIASES)
        return graph_module(*args)

    return run


def _goes_into_inference_mode(graph_module: fx.GraphModule) -> bool:
    enter = torch.autograd.grad_mode._enter_inference_mode
    return bool(graph_module.graph.find_nodes(op="call_function", target=enter))


@dataclass(frozen=True)
class Source:
    """Dynamo's side of a graph: AOTAutograd keeps the order of inputs, not names nor tensors.

    The cause is known while Dynamo compiles; a backward graph may be compiled at its first use.
    `inputs` are there while it is compiled. `inferred` takes what runs the graph, if it is one
    without gradients, of host tensors.
    """

    inputs: list[Any]
    names: tuple[str, ...]
    free_offsets: tuple[bool, ...]
    caller: bundles.Caller | None
    cause: Cause
    donated: Donated
    inferred: list[Runner | SharedGraph]

    @classmethod
    def of(cls, graph_module: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Source:
        """Take it from what Dynamo gives."""
        nodes = graph_module.graph.find_nodes(op="placeholder")
        values = [node.meta.get("example_value") for node in nodes]
        free = (
            isinstance(v, torch.Tensor) and not isinstance(v.storage_offset(), int) for v in values
        )
        return cls(
            inputs=list(inputs),
            names=_input_names(graph_module),
            free_offsets=tuple(free),
            caller=bundles.caller(),
            cause=Cause.now(),
            donated=donated_inputs(graph_module, inputs, options.donate),
            inferred=[],
        )

    def aliases(self) -> Aliases | None:
        """Return how the inputs share memory; None if the graph writes to none of them."""
        found = metadata()
        if found is None or not any(info.mutates_data for info in found.input_info):
            return None
        every = range(len(self.inputs))
        is_same = len(found.input_info) == len(self.inputs)  # none is made of several
        written = [i for i in every if not is_same or found.input_info[i].mutates_data]
        with unset_fake_temporarily():  # AOTAutograd asks inside its fake tensor mode
            return Aliases(self.inputs, self.free_offsets, written)


def _input_names(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """Return what the user would call the inputs of a graph of Dynamo's: `x`, `self_weight`."""
    nodes = graph_module.graph.find_nodes(op="placeholder")
    return tuple(n.name.removeprefix("l_").strip("_") for n in nodes)


def _compile_aot(
    options: Options,
    source: Source,
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    kind: str,
) -> Callable[..., Any]:
    """Compile a graph of AOTAutograd's into what it calls: a list of arguments in, a list out."""
    if kind == "forward":
        allow_second_backward()
    graph = aot_graph(options, source, kind, len(inputs))
    if graph.donated.names:
        refuse_what_lives_on(graph.donated, graph_module, kind)
    if is_precompiling():
        aliases = source.aliases() if kind != "backward" else None
        return precompiled(graph, graph_module, source.cause, aliases)
    loaded = graph.load(graph_module, source.cause, source.caller)
    if loaded.direct is not None and kind == "inference":
        source.inferred.append(loaded.direct)
    return loaded.run


def aot_graph(options: Options, source: Source, kind: str, count: int) -> AotGraph:
    """Say what a graph of AOTAutograd's, which has so many inputs, is compiled as."""
    dense = list(_dense(source.inputs)) if kind == "inference" else []
    is_same = len(dense) == count
    return AotGraph(
        options=options,
        kind=kind,
        names=source.names if is_same and len(source.names) == count else (),
        weights=_bindable_weights(dense) if is_same and options.bind_weights else (),
        donated=source.donated if kind != "backward" else NOTHING,
        returned=_count_returned(kind),
        views=_views_of_arguments(kind, count),
    )


def _count_returned(kind: str) -> int | None:
    """Return how many results of a graph outlive a step of training; None: all."""
    if kind == "inference":
        return None
    found = metadata()
    return found.num_forward if kind == "forward" and found is not None else 0


def _views_of_arguments(kind: str, count: int) -> Sequence[int]:
    """Return which results are to be made as views of arguments."""
    found = metadata() if kind != "backward" else None
    is_same = found is not None and len(found.input_info) == count  # none is made of several
    return views_of_arguments(found) if is_same else ()


def _dense(inputs: Sequence[Any]) -> Iterator[Any]:
    """Give inputs in the order of AOTAutograd's graph, which takes apart what is made of tensors.

    So are quantized weights: integers and scales. Where their sizes are unknown, the graph has
    these after them, and so more inputs than are given here, by which the caller knows.
    """
    for value in inputs:
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            yield from _dense([getattr(value, name) for name in names])
        else:
            yield value


def _bindable_weights(inputs: Sequence[Any]) -> Sequence[int]:
    """Positions of the inputs that keep their identity, are not written to, and can be watched."""
    found = metadata()
    if found is None or len(found.input_info) != len(inputs):
        return []
    mutated = set(found.mutated_inp_runtime_indices)
    return [
        i
        for i in found.static_input_indices
        if i not in mutated and isinstance(inputs[i], torch.Tensor) and can_freeze(inputs[i])
    ]

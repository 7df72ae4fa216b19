"""Graphs that AOTAutograd has traced before: PyTorch's cache keeps them, and we plan them again.

Tracing and decomposing a graph is the most of a first call whose regions are all in the cache.
PyTorch keeps what AOTAutograd has made, by what Dynamo has captured, in its own cache folder
(`TORCHINDUCTOR_CACHE_DIR`; `torch._functorch.config.enable_autograd_cache` turns it off). What is
kept of ours is the functional graph, and nothing that was decided about it: what runs where, and
which code is right for this machine, is looked at anew.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._guards import TracingContext
from torch._inductor import codecache
from torch._inductor.output_code import OutputCode
from torch._library.utils import is_builtin
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PickleOptions

from lowering.digest import text_digest
from lowering.key import compiler_build
from npu_iree.options import Options
from npu_iree.settings import Settings

_Run = Callable[[list[Any]], list[Any]]
_Compile = Callable[[fx.GraphModule, Sequence[Any]], _Run]
_KEPT = frozenset({"val", "stack_trace"})  # of what a node tells of itself
_COMPILE: ContextVar[_Compile] = ContextVar("compile")


@dataclass
class TracedGraph(OutputCode):
    """An inference graph of AOTAutograd's and what runs it, as PyTorch's cache takes it.

    Attributes:
        graph: the graph, pickled; empty if it cannot be.
        metadata: what AOTAutograd has found out about its inputs and results.
        run: runs it; None while it lies in the cache.
    """

    graph: bytes
    metadata: Any
    run: _Run | None = None

    def __post_init__(self) -> None:
        self._boxed_call = True  # wrappers copy what an object itself holds

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run it on arguments that are taken out of their list."""
        assert self.run is not None
        return self.run(inputs)  # type: ignore[arg-type]

    def prepare_for_serialization(self) -> None:
        """Leave what cannot be kept."""
        if not self.graph:
            raise BypassAOTAutogradCache("the graph cannot be pickled")
        self.run = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Compile it in this process, as if AOTAutograd had just traced it."""
        context = TracingContext.get()
        assert context.fake_mode is not None
        context.fw_metadata = self.metadata
        with _no_garbage():
            graph: Any = GraphPickler.loads(zlib.decompress(self.graph), context.fake_mode)
            inputs = graph.graph.find_nodes(op="placeholder")
            self.run = _COMPILE.get()(graph, [node.meta["val"] for node in inputs])


def kept(forward: _Compile, inference: _Compile) -> dict[str, Any]:
    """Return what AOTAutograd is asked for so that PyTorch's cache keeps inference graphs.

    Args:
        forward: compiles the forward graph of training, which is not kept.
        inference: compiles a graph without gradients.
    """

    def traced(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> TracedGraph:
        functorch_config.bundled_autograd_cache = True  # until `traced_graphs` ends
        graph = TracedGraph(_dumped(graph_module), TracingContext.get().fw_metadata)
        graph.run = inference(graph_module, inputs)  # which changes it
        return graph

    forward_compiler = SerializableAOTDispatchCompiler(TracedGraph, forward)  # type: ignore[arg-type]
    return {"fw_compiler": forward_compiler, "inference_compiler": traced}


def _dumped(graph_module: fx.GraphModule) -> bytes:
    options = PickleOptions(ops_filter=None, node_metadata_key_filter=_KEPT.__contains__)
    try:
        with unset_fake_temporarily():
            return zlib.compress(GraphPickler.dumps(graph_module, options), level=1)
    except Exception:  # pickling runs anybody's code
        return b""


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Search for no garbage among what comes to life in the block."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


@contextlib.contextmanager
def traced_graphs(
    options: Options, graph_module: fx.GraphModule, compile_graph: _Compile
) -> Iterator[None]:
    """Let AOTAutograd look for a graph of Dynamo's in PyTorch's cache.

    Args:
        options: of the `torch.compile` call.
        graph_module: Dynamo's graph.
        compile_graph: compiles a graph that was found.
    """
    config: Any = torch.compiler.config
    tag = f"{config.cache_key_tag} {_tag(options, graph_module)}"
    token = _COMPILE.set(compile_graph)
    try:
        with (
            config.patch(cache_key_tag=tag),
            functorch_config.patch(bundled_autograd_cache=False),
            # For its key, PyTorch imports Inductor's code generators, which takes half a second.
            patch.object(codecache, "init_backend_registration", lambda: None),
        ):
            yield
    finally:
        _COMPILE.reset(token)


def can_be_kept(options: Options, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Say whether PyTorch's key tells apart all that decides what AOTAutograd makes of a graph.

    It does not know what is behind functions of the user's (decompositions, custom ops), tells
    tensors that the graph holds apart by shape only, and sizes that may change need guards.

    Args:
        options: of the `torch.compile` call.
        graph_module: Dynamo's graph.
        inputs: its inputs.
    """
    kinds = (torch.Tensor, torch.nn.Parameter)
    return (
        Settings.read().cache is not None
        and not options.decompositions
        and all(type(value) in kinds and value.device.type == "cpu" for value in inputs)
        and all(_is_known(node) for node in graph_module.graph.nodes)
    )


def _is_known(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverloadPacket):
        return node.target._qualified_op_name.startswith(("aten::", "prims::"))
    if isinstance(node.target, OpOverload):
        return is_builtin(node.target)
    return node.op in ("placeholder", "output", "call_method", "call_function")


def _tag(options: Options, graph_module: fx.GraphModule) -> str:
    """Tell apart what PyTorch's key does not: who decomposes, how, and the user's lines."""
    keep = options.keep_ops | options.target_value.compile.keep_ops
    backends: Any = torch.backends
    state = (
        torch.is_inference_mode_enabled(),
        torch.get_default_device(),
        backends.mkldnn.enabled,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
    )
    lines = [str(node.meta.get("stack_trace")) for node in graph_module.graph.nodes]
    parts = (_build(), sorted(keep), options.rng, state, lines)
    return f"npu_iree {text_digest(repr(parts))}"


@functools.cache
def _build() -> Sequence[str]:
    """Return what traces: our decompositions, and what AOTAutograd is asked for."""
    here = Path(__file__)
    ours = [path.read_text() for path in (here, here.with_name("aot.py"))]
    return [*map(str, compiler_build().items()), *map(text_digest, ours)]

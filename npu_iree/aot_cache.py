"""Graphs that AOTAutograd has traced before: PyTorch's cache keeps them, and we plan them again.

Tracing and decomposing a graph is the most of a first call whose regions are all in the cache. Of a
step of training, both graphs are kept, once its backward pass has been compiled.
PyTorch keeps what AOTAutograd has made, by what Dynamo has captured, in its own cache folder
(`TORCHINDUCTOR_CACHE_DIR`; `torch._functorch.config.enable_autograd_cache` turns it off). What is
kept of ours is the functional graph, and nothing that was decided about it: what runs where, and
which code is right for this machine, is looked at anew.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._functorch._aot_autograd.autograd_cache import (
    BypassAOTAutogradCache,
    should_bundle_autograd_cache,
    should_use_local_autograd_cache,
)
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._inductor import codecache
from torch._inductor.output_code import OutputCode
from torch._library.utils import is_builtin
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.experimental.symbolic_shapes import free_symbols

from lowering.decompositions import decomposition_table
from lowering.digest import text_digest
from lowering.key import compiler_build
from npu_iree.frozen import storage_id
from npu_iree.graph_bytes import graph_bytes, graph_from_bytes
from npu_iree.options import Options
from npu_iree.settings import Settings

_Run = Callable[[list[Any]], list[Any]]
_Compiler = Callable[[fx.GraphModule, Sequence[Any]], _Run]
_COMPILERS = ("fw_compiler", "bw_compiler", "inference_compiler")
_PYTORCHS = ("torch", "_operator", "math", "builtins")  # where functions are whose code we know
# Who replaces an op of PyTorch's for one of these decides what is traced on the CPU.
_DISPATCH_KEYS = frozenset(
    {
        "Autograd",
        "AutogradCPU",
        "CPU",
        "CompositeExplicitAutograd",
        "CompositeImplicitAutograd",
        "Functionalize",
        "Python",
    }
)


@dataclass
class TracedGraph(OutputCode):
    """A graph of AOTAutograd's and what runs it, as PyTorch's cache takes it.

    Attributes:
        pickled: the graph; empty if it is not to be kept.
        metadata: what AOTAutograd has found out about inputs and results; None for a backward
            graph, whose forward graph has it.
        graph_module: the graph, when it has come out of the cache.
        run: runs it; None while it lies in the cache.
    """

    pickled: bytes
    metadata: Any
    graph_module: Any = None
    run: _Run | None = None

    def __post_init__(self) -> None:
        self._boxed_call = True  # wrappers copy what an object itself holds

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run it on arguments that are taken out of their list."""
        assert self.run is not None
        return self.run(inputs)  # type: ignore[arg-type]

    def prepare_for_serialization(self) -> None:
        """Leave what cannot be kept."""
        if not self.pickled:
            raise BypassAOTAutogradCache("not all that its tracing depends on is in the key")
        self.run = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Take the graph out, as if AOTAutograd had just traced it; `trace` compiles it."""
        self.graph_module = self._unpickled()
        if self.metadata is not None:
            TracingContext.get().fw_metadata = self.metadata
        _FOUND.get().append(self)

    def _unpickled(self) -> fx.GraphModule:
        mode = TracingContext.get().fake_mode
        assert mode is not None
        return graph_from_bytes(self.pickled, mode)

    def compile(self, compiler: _Compiler) -> None:
        """Compile the graph that came out of the cache."""
        # Compiling changes it: after one that failed, another begins with what was kept.
        graph_module, self.graph_module = self.graph_module or self._unpickled(), None
        nodes = graph_module.graph.find_nodes(op="placeholder")
        self.run = compiler(graph_module, [node.meta["val"] for node in nodes])

    def compile_at_first_call(self, compiler: _Compiler) -> None:
        """Compile it when it is called, as AOTAutograd has backward graphs compiled."""
        context, compiling = TracingContext.get(), CompileContext.try_get()
        lock = threading.Lock()  # of several threads that call it first, one compiles

        def run(inputs: list[Any]) -> list[Any]:
            with lock:
                if self.run is run:
                    with tracing(context), compile_context(compiling), torch._C._DisableAutocast():
                        self.compile(compiler)
            assert self.run is not None
            return self.run(inputs)

        self.run = run


_FOUND: ContextVar[list[TracedGraph]] = ContextVar("found")


class _Table(Mapping[OpOverload, Callable[..., Any]]):
    """The table to decompose with, made when something is traced, which takes a tenth of a second.

    Args:
        options: of the `torch.compile` call.
        before: called before it is made.
    """

    def __init__(self, options: Options, before: Callable[[], object] = lambda: None) -> None:
        self._options, self._before = options, before

    @functools.cached_property
    def _table(self) -> Mapping[OpOverload, Callable[..., Any]]:
        self._before()
        options = self._options
        return decomposition_table(options.whole_ops, options.decompositions, options.rng)

    def __getitem__(self, op: OpOverload) -> Callable[..., Any]:
        return self._table[op]

    def __iter__(self) -> Iterator[OpOverload]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def trace(
    options: Options,
    asked: Mapping[str, Any],
    when_new: Callable[[], object],
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
) -> Any:
    """Have AOTAutograd trace a graph of Dynamo's and compile it, or find that it was traced before.

    Args:
        options: of the `torch.compile` call.
        asked: what AOTAutograd is asked for, with its compilers.
        when_new: called before a graph is traced that would have been kept, had it been before.
        graph_module: Dynamo's graph.
        inputs: its inputs.
    """
    guards = _count_guards()
    if guards is None or not _can_be_kept(options, graph_module, inputs):
        return aot_autograd(**asked, decompositions=_Table(options))(graph_module, inputs)
    found = list[TracedGraph]()
    forward, backward, inference = (asked[name] for name in _COMPILERS)

    def traced(
        compiler: _Compiler, graph_module: fx.GraphModule, inputs: Sequence[Any]
    ) -> TracedGraph:
        found.clear()  # what came out of the cache was refused
        _bundle()
        metadata = TracingContext.get().fw_metadata if compiler is not backward else None
        # What comes out of the cache is called without the tokens that order effects.
        is_ordered = metadata is not None and bool(metadata.tokens)
        pickled = b"" if is_ordered else _pickled(graph_module, guards)
        graph = TracedGraph(pickled, metadata)
        graph.run = compiler(graph_module, inputs)  # which changes it
        return graph

    kept = {
        name: SerializableAOTDispatchCompiler(TracedGraph, functools.partial(traced, asked[name]))
        for name in _COMPILERS
    }
    token = _FOUND.set(found)
    try:
        with _pytorchs_key(options, graph_module, inputs), _old_objects_at_rest():
            compiled = aot_autograd(**{**asked, **kept}, decompositions=_Table(options, when_new))(
                graph_module, inputs
            )
            if len(found) == 1:
                found[0].compile(inference)
            elif found:
                found[0].compile(forward)
                found[1].compile_at_first_call(backward)
    finally:
        _FOUND.reset(token)
    return compiled


_IS_BUNDLED = ContextVar(
    "is_bundled", default=False
)  # by us, as is PyTorch's own switch: a thread's


def _bundle() -> None:
    """Have PyTorch keep what compilers give it, until the compile ends.

    It does so when both graphs of a step are there. The second is compiled in a call, of which we
    see no end but by PyTorch's callback.
    """
    if not functorch_config.bundled_autograd_cache:
        functorch_config.bundled_autograd_cache = True
        if _unbundle not in callback_handler.end_callbacks:
            callback_handler.register_end_callback(_unbundle)
        _IS_BUNDLED.set(True)


# Called with a lock held that a compile of Dynamo's asks for, too.
@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _unbundle(_: CallbackArgs) -> None:
    if _IS_BUNDLED.get():
        functorch_config.bundled_autograd_cache = False
        _IS_BUNDLED.set(False)


def _pickled(graph_module: fx.GraphModule, guards: int) -> bytes:
    """Pickle a graph; empty if its tracing met what guards, or sizes that are not known, are for.

    Args:
        graph_module: the graph.
        guards: how many there were before it was traced.
    """
    values = [node.meta.get("val") for node in graph_module.graph.nodes]
    try:
        if _count_guards() != guards or any(map(free_symbols, values)):
            return b""
        return graph_bytes(graph_module)
    except Exception:  # pickling runs anybody's code
        return b""


def _count_guards() -> int | None:
    """Count what is assumed of sizes and numbers so far; None: nobody compiles with guards."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    sizes = mode.shape_env if mode is not None else None
    return len(sizes.guards) + sizes.num_deferred_runtime_asserts if sizes is not None else None


@contextlib.contextmanager
def _pytorchs_key(
    options: Options, graph_module: fx.GraphModule, inputs: Sequence[Any]
) -> Iterator[None]:
    """Make PyTorch's key one of ours. Dynamo's lock is held, so the settings are ours, too."""
    config: Any = torch.compiler.config
    tag = f"{config.cache_key_tag} {_tag(options, graph_module, inputs)}"
    with (
        config.patch(cache_key_tag=tag),
        functorch_config.patch(bundled_autograd_cache=False),
        # For its key, PyTorch imports Inductor's code generators, which takes half a second, and
        # reads all of its own sources, which takes a tenth.
        patch.object(codecache, "init_backend_registration", lambda: None),
        patch.object(codecache, "torch_key", _torch_build),
    ):
        yield


@contextlib.contextmanager
def _old_objects_at_rest() -> Iterator[None]:
    """Search for garbage only among what comes to life in the block, which is many small objects.

    What PyTorch and a model have in memory is some hundred thousand objects: a search is 0.1 s.
    """
    is_ours = gc.get_freeze_count() == 0
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


def _can_be_kept(options: Options, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Say whether the key tells apart all that decides what AOTAutograd makes of a graph.

    It does not know what is behind functions of the user's (decompositions, ops), tells tensors
    that the graph holds apart by shape only, and inputs that share memory not at all. Sizes that
    may change need guards, which are not kept.

    Args:
        options: of the `torch.compile` call.
        graph_module: Dynamo's graph.
        inputs: its inputs.
    """
    return (
        Settings.read().cache is not None
        and should_use_local_autograd_cache()
        and not should_bundle_autograd_cache()  # PyTorch wants all that we compile, too
        and not options.decompositions
        and all(map(_is_plain, inputs))
        and len(set(map(storage_id, inputs))) == len(inputs)
        and all(_is_known(node) for node in graph_module.graph.nodes)
        and not any(_replaces_pytorchs(name) for name in torch.library._impls)
    )


def _is_plain(value: Any) -> bool:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.device.type == "cpu" and value.layout is torch.strided


def _is_known(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverloadPacket):
        return node.target._qualified_op_name.startswith(("aten::", "prims::"))
    if isinstance(node.target, OpOverload):
        return is_builtin(node.target)
    if node.op == "call_function":
        return str(getattr(node.target, "__module__", "")).partition(".")[0] in _PYTORCHS
    return node.op in ("placeholder", "output", "call_method")


def _replaces_pytorchs(name: str) -> bool:
    """Say whether something that was registered (`aten/mm/CPU`) replaces an op of PyTorch's."""
    return name.startswith("aten/") and name.rpartition("/")[2] in _DISPATCH_KEYS


def _tag(options: Options, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Tell apart what PyTorch's key does not: who decomposes, how, and the user's lines."""
    backends: Any = torch.backends
    state = (
        torch.is_inference_mode_enabled(),
        torch.get_default_device(),
        backends.mkldnn.enabled,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.opt_einsum.enabled,
        backends.opt_einsum.strategy,
    )
    offsets = [value.storage_offset() for value in inputs]
    lines = [str(node.meta.get("stack_trace")) for node in graph_module.graph.nodes]
    ours = sorted(options.whole_ops), options.rng, options.target_value.compile.rewrites
    parts = (_build(), *ours, state, offsets, lines)
    return f"npu_iree {text_digest(repr(parts))}"


@functools.cache
def _build() -> Sequence[str]:
    """Return what traces: our decompositions, and what AOTAutograd is asked for."""
    here = Path(__file__)
    names = ("aot.py", "aot_cache.py", "graph_bytes.py", "saved_images.py")
    ours = [here.with_name(name).read_text() for name in names]
    return [*map(str, compiler_build().items()), *map(text_digest, ours)]


@functools.cache
def _torch_build() -> bytes:
    """Return what tells one PyTorch from another, and from itself after somebody has edited it.

    As Python itself tells whether a source has changed since it was compiled: by time and size.
    """
    files = sorted(_sources(Path(torch.__file__).parent, ""))
    return text_digest(repr((torch.__version__, torch.version.git_version, files))).encode()


def _sources(folder: os.PathLike[str] | str, name: str) -> Iterator[tuple[str, int, int]]:
    """Give the name, time in seconds and size in bytes of each file of code below a folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _sources(entry.path, f"{name}/{entry.name}")
            elif entry.name.endswith((".py", ".so")):
                stat = entry.stat()
                yield f"{name}/{entry.name}", int(stat.st_mtime), stat.st_size

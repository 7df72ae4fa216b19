"""What `torch.compile(...).aot_compile` saves of a graph: the graph, and what was built for it.

The function that it gives back is saved and loaded by PyTorch (`save_compiled_function`,
`torch.compiler.load_compiled_function`), which traces nothing then; we compile nothing.
Source: torch/_dynamo/aot_compile.py, `OutputCode` in torch/_inductor/output_code.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import fx
from torch._functorch import config
from torch._guards import TracingContext
from torch._inductor.output_code import OutputCode

from npu_iree.aliasing import OTHER_ALIASES, Aliases
from npu_iree.aot_graph import AotGraph
from npu_iree.bundles import built_bytes
from npu_iree.cause import Cause
from npu_iree.errors import ArtifactError, NpuIreeError
from npu_iree.graph_bytes import graph_bytes, graph_from_bytes
from npu_iree.transforms import TANGENTS, have_tangents
from npu_iree.versions import check_versions


def is_precompiling() -> bool:
    """Say whether `aot_compile` asks, rather than PyTorch's cache, whose key does not know us."""
    return bool(config.bundled_autograd_cache and config.bypass_autograd_cache_key)


def precompiled(
    graph: AotGraph, graph_module: fx.GraphModule, cause: Cause, aliases: Aliases | None
) -> PrecompiledGraph:
    """Compile a graph, which is changed, into what PyTorch can save.

    Args:
        graph: what it is compiled as.
        graph_module: the graph.
        cause: why it is compiled, for the report.
        aliases: how its arguments may share memory; None if that makes no difference.

    Raises:
        NpuIreeError: it cannot be saved, or not compiled.
    """
    if aliases is not None and aliases.are_shared:
        raise NpuIreeError(
            "aot_compile cannot save a graph that writes to arguments which share memory; give it "
            "tensors with memory of their own"
        )
    try:
        pickled = graph_bytes(graph_module)
    except Exception as error:  # pickling runs anybody's code
        raise NpuIreeError(f"aot_compile cannot save a graph: {error}") from error
    loaded = graph.load(graph_module, cause)
    bundle = built_bytes(loaded.runner) if loaded.runner is not None else b""
    # What was decomposed stays so; what the bundle had is in ours.
    options = replace(graph.options, decompositions={}, bundle=None)
    saved = replace(graph, options=options)
    return PrecompiledGraph(saved, pickled, bundle, aliases, loaded.run)


@dataclass
class PrecompiledGraph(OutputCode):
    """A graph of AOTAutograd's and what runs it, as PyTorch saves it.

    Attributes:
        graph: what it is compiled as.
        pickled: the graph itself.
        bundle: its compiled regions, and what was decided: the bytes of a bundle.
        aliases: how its arguments may share memory; None if that makes no difference.
        run: runs it; None while it lies in a file.
    """

    graph: AotGraph
    pickled: bytes
    bundle: bytes
    aliases: Aliases | None
    run: Callable[[list[Any]], list[Any]] | None

    def __post_init__(self) -> None:
        self._boxed_call = True  # wrappers copy what an object itself holds

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run it on arguments that are taken out of their list.

        Raises:
            NpuIreeError: arguments that it writes to share memory in another way, or they carry
                tangents.
        """
        assert self.run is not None
        if self.graph.kind != "backward" and have_tangents(inputs):
            raise NpuIreeError(TANGENTS)
        if self.aliases is not None and not self.aliases.are_as_compiled(inputs):
            raise NpuIreeError(OTHER_ALIASES)
        return self.run(inputs)  # type: ignore[arg-type]

    def prepare_for_serialization(self) -> None:
        """Leave what cannot be saved."""
        self.run = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Load it, in the process that has read it from a file.

        Raises:
            ArtifactError: it is damaged, or is for another target or CPU.
            VersionError: other versions of torch or IREE are installed.
        """
        check_versions("torch", "iree-base-runtime")
        context = TracingContext.get()
        assert context.fake_mode is not None
        graph_module = graph_from_bytes(self.pickled, context.fake_mode)
        with _as_file(self.bundle) if self.bundle else contextlib.nullcontext() as bundle:
            options = replace(self.graph.options, bundle=bundle)
            try:
                self.run = replace(self.graph, options=options).load(graph_module).run
            except ArtifactError as error:
                raise ArtifactError("what aot_compile has saved", error.reason) from error


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[Path]:
    """Give a file that holds bytes; in memory where possible: a container may have no other place.

    Raises:
        OSError: there is no place for it.
    """
    if sys.platform == "linux":
        with open(os.memfd_create("npu-iree-bundle"), "wb") as file:
            file.write(data)
            file.flush()
            yield Path(f"/proc/self/fd/{file.fileno()}")
        return
    with tempfile.NamedTemporaryFile() as named:
        named.write(data)
        named.flush()
        yield Path(named.name)

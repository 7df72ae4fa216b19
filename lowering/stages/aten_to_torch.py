"""Stage 1: functional ATen graphs to IR in torch-mlir's torch dialect."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping

from torch import fx

from lowering.graph_modules import graph_module_of
from lowering.stages import CompileOptions, Stage
from lowering.stages.call_kernels import call_kernels
from lowering.stages.torch_mlir_context import TorchMlirContext
from lowering.stages.torch_to_dispatches import NODE_FILE


def aten_to_torch(graphs: Mapping[str, fx.GraphModule], options: CompileOptions) -> str:
    """Import graphs into the torch dialect, each as one entry point.

    Before: %relu = call_function[target=torch.ops.aten.relu.default](args = (%a0,))
    After:  %0 = torch.aten.relu %arg0 : !torch.vtensor<[4,8],f32> -> !torch.vtensor<[4,8],f32>

    Args:
        graphs: by the name of their entry point; every node carries its fake tensor in
            `meta["val"]`, sizes may be symbolic.
        options: `kernels` are called in the place of their ops.

    Returns:
        One module with a function for each graph.

    Raises:
        RuntimeError: torch-mlir cannot import a graph.
    Source: torch-mlir `FxImporter.import_stateless_graph`.
    """
    return _imported(graphs, options, with_locations=False)


def aten_to_located_torch(graphs: Mapping[str, fx.GraphModule], options: CompileOptions) -> str:
    """Import graphs as `aten_to_torch` does, each op located at the node that it comes from.

    A location is the position of the graph and of its node, so that equal programs stay equal,
    whichever file they are from. It goes through all later stages that are told to keep it.

    After:  %0 = torch.aten.relu %arg0 : ... loc("node/0":1:0)
    """
    marked = {name: _marked(graph, i) for i, (name, graph) in enumerate(graphs.items())}
    return _imported(marked, options, with_locations=True)


def _imported(
    graphs: Mapping[str, fx.GraphModule], options: CompileOptions, *, with_locations: bool
) -> str:
    from torch_mlir.extras.fx_importer import FxImporter

    with _without_root_handler(), TorchMlirContext() as mlir:
        importer = FxImporter(context=mlir.context)
        for name, graph_module in graphs.items():
            importer.import_stateless_graph(graph_module.graph, func_name=name)
        with mlir.context:
            call_kernels(importer.module, options.kernels)
        return str(importer.module.operation.get_asm(enable_debug_info=with_locations))


def _marked(graph_module: fx.GraphModule, position: int) -> fx.GraphModule:
    """Copy a graph; each node of the copy says that its position is where it comes from.

    Source: torch-mlir makes an op's location of the `File "...", line ...` in its stack trace.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for i, node in enumerate(graph_module.graph.nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta["stack_trace"] = f'File "{NODE_FILE}{position}", line {i}, in graph'
    return graph_module_of(graph_module, graph)


@contextlib.contextmanager
def _without_root_handler() -> Iterator[None]:
    """Keep the importer from setting up the user's logging.

    It calls `logging.debug`, which puts a handler on a root logger that has none: from then on
    every message of every package would be on the user's screen.
    """
    root, silent = logging.getLogger(), logging.NullHandler()
    root.addHandler(silent)
    try:
        yield
    finally:
        root.removeHandler(silent)


def _only_torch(asm: str) -> str | None:
    return None if "func.func @" in asm else "the module has no function"


ATEN_TO_TORCH = Stage("aten-to-torch", "torch.mlir", aten_to_torch, _only_torch)
ATEN_TO_LOCATED_TORCH = Stage(
    "aten-to-located-torch", "located.torch.mlir", aten_to_located_torch, _only_torch
)

"""Stage 1: a functional ATen graph to IR in torch-mlir's torch dialect."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from torch import fx

from lowering.abi import ENTRY
from lowering.stages import CompileOptions, Stage
from lowering.stages.torch_mlir_context import TorchMlirContext


def aten_to_torch(graph_module: fx.GraphModule, options: CompileOptions) -> str:
    """Import a region's graph into the torch dialect.

    Before: %relu = call_function[target=torch.ops.aten.relu.default](args = (%a0,))
    After:  %0 = torch.aten.relu %arg0 : !torch.vtensor<[4,8],f32> -> !torch.vtensor<[4,8],f32>

    Args:
        graph_module: every node carries its fake tensor in `meta["val"]`; sizes may be symbolic.
        options: not used by this stage.

    Returns:
        One module with the function `main`.

    Raises:
        RuntimeError: torch-mlir cannot import the graph.
    Source: torch-mlir `FxImporter.import_stateless_graph`.
    """
    from torch_mlir.extras.fx_importer import FxImporter

    with _without_root_handler(), TorchMlirContext() as mlir:
        importer = FxImporter(context=mlir.context)
        importer.import_stateless_graph(graph_module.graph, func_name=ENTRY)
        return str(importer.module.operation.get_asm())


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
    return None if f"func.func @{ENTRY}" in asm else f"the module has no function @{ENTRY}"


ATEN_TO_TORCH = Stage("aten-to-torch", "torch.mlir", aten_to_torch, _only_torch)

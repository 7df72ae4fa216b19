"""A torch-mlir context whose diagnostics come back as text instead of going to the screen."""

from __future__ import annotations

from typing import Any

from lowering.stages.mlir_context import MlirContext


class TorchMlirContext(MlirContext):
    """Open an MLIR context with the torch dialect; collects what passes have to say.

    Source: torch-mlir's own driver prints diagnostics to file descriptor 2 and swaps
    `sys.stderr`; a diagnostic handler on the context does neither.
    """

    def __init__(self) -> None:
        from torch_mlir import ir
        from torch_mlir.dialects import torch as torch_dialect

        context: Any = ir.Context()
        torch_dialect.register_dialect(context)
        super().__init__(context)

    def pipeline(self, pipeline: str, without: str) -> str:
        """Return the passes that a pipeline is made of, without one of them."""
        from torch_mlir.passmanager import PassManager

        with self.context:
            return str(PassManager.parse(pipeline)).replace(f",{without}", "")

    def run(self, module: Any, pipeline: str) -> None:
        """Run a textual pass pipeline on `module`, in place.

        Raises:
            RuntimeError: a pass failed; the text is what it said.
        """
        from torch_mlir.passmanager import PassManager

        try:
            with self.context:
                PassManager.parse(pipeline).run(module.operation)
        except Exception as error:
            raise RuntimeError(self.said(str(error))) from error


def load_torch_mlir() -> None:
    """Import what `TorchMlirContext` needs, before anybody counts the time."""
    import torch_mlir.dialects.torch
    import torch_mlir.ir
    import torch_mlir.passmanager  # noqa: F401

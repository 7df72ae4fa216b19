"""A torch-mlir context whose diagnostics come back as text instead of going to the screen."""

from __future__ import annotations

from types import TracebackType
from typing import Any


class TorchMlirContext:
    """Open an MLIR context with the torch dialect; collects what passes have to say.

    Source: torch-mlir's own driver prints diagnostics to file descriptor 2 and swaps
    `sys.stderr`; a diagnostic handler on the context does neither.
    """

    def __init__(self) -> None:
        from torch_mlir import ir
        from torch_mlir.dialects import torch as torch_dialect

        self.context: Any = ir.Context()
        torch_dialect.register_dialect(self.context)
        self._messages: list[str] = []
        self._handler = self.context.attach_diagnostic_handler(self._collect)

    def _collect(self, diagnostic: Any) -> bool:
        self._messages.append(f"{diagnostic.location}: {diagnostic.message}")
        return True

    @property
    def diagnostics(self) -> str:
        """Everything said so far, one message a line."""
        return "\n".join(self._messages)

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
            raise RuntimeError(self.diagnostics or str(error)) from error

    def __enter__(self) -> TorchMlirContext:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handler.detach()

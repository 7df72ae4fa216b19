"""What the contexts of both compilers share: their errors come back as text."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self


class MlirContext:
    """Collects the errors of an MLIR context while it is open, in the place of the screen.

    Attributes:
        context: of torch-mlir or of IREE; each has bindings of its own.
    """

    def __init__(self, context: Any) -> None:
        self.context = context
        self._messages: list[str] = []
        self._handler = context.attach_diagnostic_handler(self._collect)

    def _collect(self, diagnostic: Any) -> bool:
        if "error" in str(diagnostic.severity).lower():
            self._messages.append(f"{diagnostic.location}: {diagnostic.message}")
        return True

    def said(self, otherwise: str) -> str:
        """Return the errors so far, one a line; without any, `otherwise`."""
        return "\n".join(self._messages) or otherwise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handler.detach()
        self._handler = None  # else the context, which holds it, would never be freed

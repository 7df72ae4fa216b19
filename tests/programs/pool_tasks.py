"""What workers of a pool run in tests; a worker imports this module, and with it no PyTorch."""

from __future__ import annotations

import os
import signal

from npu_iree.conformance.pool import Progress


def make_ready() -> None:
    os.environ["MADE_READY"] = "as asked"


def fail(kind: str, progress: Progress) -> str:
    """End in the way that is asked for."""
    progress(kind)
    if "hang" in kind:
        progress(len(kind))
        signal.pause()
    if kind == "raise":
        raise ValueError("no reason")
    if kind == "pid":
        return str(os.getpid())
    if kind == "abort":
        os.abort()
    return f"{kind} {os.environ['MADE_READY']}"

"""The process's pool of compile workers."""

from __future__ import annotations

import atexit
import functools
import os

from lowering.service import CompileService


@functools.cache
def compile_service() -> CompileService:
    """Return the process's pool of compile workers; none is started before it is needed."""
    service = CompileService(size=max(1, min(4, os.cpu_count() or 1)))
    atexit.register(service.close)
    return service

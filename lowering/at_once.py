"""Compile several things at a time, and end all of it where nobody waits any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TypeVar

from lowering.pipeline import Toolchain

T = TypeVar("T")
R = TypeVar("R")


def at_once(
    compile: Callable[[T, Toolchain], R], values: Sequence[T], toolchain: Toolchain
) -> list[R]:
    """Compile each of these, as many at a time as there are workers; return what came of each.

    Args:
        compile: compiles one of them.
        values: what is compiled.
        toolchain: where; what `compile` gets is one that is cancelled with the others.

    Raises:
        BaseException: what `compile` raises for the first for which it does; or Ctrl-C, which ends
            the workers, and so what waits for them.
    """
    service = toolchain.service
    if service is None or len(values) < 2:
        return [compile(value, toolchain) for value in values]
    cancelled = threading.Event()
    cancellable = replace(toolchain, cancelled=cancelled)
    pool = ThreadPoolExecutor(service.size, thread_name_prefix="lowering")
    try:
        futures = [pool.submit(compile, value, cancellable) for value in values]
        wait(futures)
    except BaseException:  # Ctrl-C: the workers end, so the threads do
        cancelled.set()
        service.close()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()
    return [future.result() for future in futures]

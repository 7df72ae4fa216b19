"""Backward passes run in the thread that asks for them.

PyTorch gives each device a thread for backward passes, and counts the devices when the first pass
of a process begins: a device that is registered later has none, and a pass that reaches it ends in
an internal assertion. Nothing is lost without that thread: ops on "npu" are submitted from Python,
one at a time, and do not wait. What the caller's thread has set holds in its backward pass, too:
streams, ledgers, budgets.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch


class _Pass(threading.local):
    refusal = ""


_PASS = _Pass()


def refuse_pass(reason: str) -> None:
    """Let the backward pass of this thread end in an error: PyTorch aborts if a node raises one."""
    _PASS.refusal = reason


def register_backward() -> None:
    """Let PyTorch run backward passes in the caller's thread; once a process."""
    autograd: Any = torch.autograd
    run = _in_this_thread(autograd.graph._engine_run_backward)
    autograd._engine_run_backward = autograd.graph._engine_run_backward = run


def _in_this_thread(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_here(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            result = run(*args, **kwargs)
        reason, _PASS.refusal = _PASS.refusal, ""
        if reason:
            raise RuntimeError(reason)
        return result

    return run_here

"""Backward passes run in the thread that asks for them.

PyTorch gives each device a thread for backward passes, and counts the devices when the first pass
of a process begins: a device that is registered later has none, and a pass that reaches it ends in
an internal assertion. Nothing is lost without that thread: ops on "npu" are submitted from Python,
one at a time, and do not wait. What the caller's thread has set holds in its backward pass, too:
streams, ledgers, budgets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from npu_iree.torch_device.guard import take_error


def register_backward() -> None:
    """Let PyTorch run backward passes in the caller's thread; once a process."""
    autograd: Any = torch.autograd
    run = _in_this_thread(autograd.graph._engine_run_backward)
    autograd._engine_run_backward = autograd.graph._engine_run_backward = run


def _in_this_thread(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_here(*args: Any, **kwargs: Any) -> Any:
        take_error()
        with torch.autograd.set_multithreading_enabled(False):
            try:
                return run(*args, **kwargs)
            except SystemError:  # of a call that fails and tells of no error
                if (error := take_error()) is None:
                    raise
        try:
            raise error
        finally:
            del error  # whose traceback has this frame, with all that the pass was given

    return run_here

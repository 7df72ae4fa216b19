"""Functions that Dynamo calls as they are: what waits for a device is no part of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_F = TypeVar("_F", bound=Callable[..., Any])
_REASON = (
    "it runs a program that is compiled already, or moves data for one: call it outside of a "
    "function that is compiled with fullgraph=True"
)


def untraced(function: _F) -> _F:
    """Let a call within a compiled function break the graph, and nothing in it be compiled.

    What `torch.compiler.disable` does, at no cost to a call; that imports Dynamo, too, which a
    process that only runs artifacts never needs.
    """
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)  # the frame, and what it calls
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    told: Any = function  # what Dynamo looks for when it would trace into a call
    told._torchdynamo_disable, told._torchdynamo_disable_msg = True, _REASON
    return function

"""The call of a compiled function on the stack: the wrapper that `torch.compile` returned."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

from torch._dynamo import eval_frame

# The function that `torch.compile` returns (that of a module is its `forward`); it closes over
# `self`, Dynamo's context of this one call of torch.compile, and `fn`, what is compiled.
_WRAPPER = "compile_wrapper"


def wrapper_locals() -> Mapping[str, Any] | None:
    """Return the locals of the wrapper, `self` and `fn` among them, or None.

    It is the innermost one, if a compiled function calls another.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if is_wrapper(frame.f_code):
            return frame.f_locals
        frame = frame.f_back
    return None


def is_wrapper(code: CodeType) -> bool:
    """Say whether a frame is that of a compiled function's wrapper."""
    return code.co_name == _WRAPPER and code.co_filename == eval_frame.__file__


def is_compiled_function(function: object) -> bool:
    """Say whether a function or module is what `torch.compile` made of another."""
    is_wrapper = hasattr(function, "_torchdynamo_orig_callable")
    is_disabled = hasattr(function, "_torchdynamo_disable")
    return isinstance(function, eval_frame.OptimizedModule) or (is_wrapper and not is_disabled)

"""Calls that reach a compiled graph through PyTorch's transforms: PyTorch's own kernels run them.

A tensor's tangent of forward-mode AD is beside its memory, and a batch of gradients that comes as
one of them has no memory of its own. A region reads memory.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _functorch
from torch._dynamo.utils import counters
from torch.autograd import forward_ad

from npu_iree.errors import NpuIreeError
from npu_iree.host_memory import has_tangent

log = logging.getLogger(__name__)
TANGENTS = (
    "arguments carry tangents of forward-mode AD (torch.autograd.forward_ad), which no region "
    "computes; torch.func.jvp within the compiled function is compiled"
)
BATCHES = (
    "gradients come in batches (is_grads_batched, vectorize=True), which no region reads; "
    "torch.func.jacrev within the compiled function is compiled"
)
_BATCHING: Any = torch._C._parse_dispatch_key("VmapMode")


def have_tangents(args: Sequence[Any]) -> bool:
    """Say whether an argument of a call has a tangent of the level of forward-mode AD."""
    if forward_ad._current_level < 0:
        return False
    return any(has_tangent(arg) for arg in args if isinstance(arg, torch.Tensor))


def why_in_eager(args: Sequence[Any]) -> str:
    """Say why a call cannot be that of a compiled backward graph; empty if it can."""
    return TANGENTS if have_tangents(args) else BATCHES if _are_batched(args) else ""


def _are_batched(args: Sequence[Any]) -> bool:
    if not torch._C._dispatch_tls_is_dispatch_key_included(_BATCHING):
        return False
    tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
    return any(map(_functorch.is_legacy_batchedtensor, tensors))


def teller(fallback: str) -> Callable[[str], None]:
    """Return what tells why a call of a graph runs in eager: of each reason once.

    Args:
        fallback: the option; of `error`, what is returned raises `NpuIreeError`.
    """
    warn = functools.cache(log.warning)

    def tell(reason: str) -> None:
        if fallback == "error":
            raise NpuIreeError(reason)
        counters["npu_iree"]["eager_calls"] += 1
        warn("calls run in eager: %s", reason)

    return tell


def without_tangents(
    run: Callable[[list[Any]], Any], in_eager: Callable[..., Any], fallback: str
) -> Callable[..., Any]:
    """Return what runs calls whose arguments have tangents in eager, and the others compiled.

    Args:
        run: takes the arguments out of a list.
        in_eager: takes them one by one.
        fallback: the option.
    """
    tell = teller(fallback)

    def call(*args: Any) -> Any:
        if forward_ad._current_level >= 0 and have_tangents(args):
            tell(TANGENTS)
            return in_eager(*args)
        return run(list(args))

    return call

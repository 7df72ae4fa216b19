"""Compile the kernels of common eager ops ahead, in parallel: a first session does not wait.

Kernels serve all sizes of a rank and dtype, so a call of each kind on a small tensor is enough.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch._dynamo.utils import counters
from torch.nn import functional as F

from npu_iree.torch_device import module

Call = Callable[[], object]
_NUMBER = 1.5
_SIZES = (3, 4, 5, 6)  # of the dimensions; no two are equal

_BINARY = ("add", "sub", "mul", "div", "pow", "eq", "ne", "lt", "gt")
_OF_TENSORS = ("maximum", "minimum")
_UNARY = (
    *("abs", "neg", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "relu"),
    *("square", "reciprocal", "erf", "floor", "ceil", "sign", "clone"),
)
_REDUCTIONS = ("sum", "mean", "amax", "amin", "std", "var", "argmax")
_ROWS = ("softmax", "log_softmax")
_ACTIVATIONS = ("gelu", "silu", "leaky_relu")


@dataclass(frozen=True)
class Prebuilt:
    """What came of it: how many calls, kernels compiled, and calls that ran on the host."""

    calls: int
    compiled: int
    on_host: int


def prebuild(
    dtypes: Sequence[torch.dtype], ranks: Sequence[int], jobs: int, tell: Callable[[int], None]
) -> Prebuilt:
    """Compile the kernels of common ops for "npu", which has been registered.

    Args:
        dtypes: of the tensors.
        ranks: how many dimensions they have.
        jobs: how many calls at the same time; the compile service has its own limit.
        tell: told after each call how many there were.
    """
    before = Counter(counters["npu_iree"])
    calls = [c for d, r in itertools.product(dtypes, ranks) for c in common_calls(d, r)]
    with ThreadPoolExecutor(jobs, thread_name_prefix="npu-iree-prebuild") as pool:
        for count, _ in enumerate(pool.map(_call, calls), start=1):
            tell(count)
    module.synchronize()
    made = Counter(counters["npu_iree"]) - before
    on_host = sum(number for name, number in made.items() if name.startswith("host "))
    return Prebuilt(len(calls), made["compiles"], on_host)


def common_calls(dtype: torch.dtype, rank: int) -> Iterator[Call]:
    """Give calls of common ops on tensors of a dtype and rank."""
    shape = _SIZES[:rank]
    a, b = (torch.ones(shape, dtype=dtype).to("npu") for _ in range(2))
    for name in _BINARY:
        yield partial(getattr(torch, name), a, b)
        yield partial(getattr(torch, name), a, _NUMBER)
    for name in _OF_TENSORS:
        yield partial(getattr(torch, name), a, b)
    for name in _UNARY:
        yield partial(getattr(torch, name), a)
    for name in _REDUCTIONS:
        yield partial(getattr(torch, name), a)
        yield partial(getattr(torch, name), a, -1)
    for name in _ROWS:
        yield partial(getattr(F, name), a, -1)
    for name in _ACTIVATIONS:
        yield partial(getattr(F, name), a)
    yield from _optimizer_calls(a, b)
    yield lambda: torch.where(a > b, a, b)
    yield lambda: torch.cat([a, b])
    yield lambda: torch.stack([a, b])
    yield lambda: a.transpose(0, -1).contiguous() + 1
    yield lambda: a[1:].clone()
    if rank > 1:
        row = b[(0,) * (rank - 1)]
        yield lambda: F.layer_norm(a, shape[-1:], row, row)
        yield lambda: a @ b.transpose(-1, -2)
        yield lambda: F.linear(a, b.reshape(-1, shape[-1]))


def _optimizer_calls(a: torch.Tensor, b: torch.Tensor) -> Iterator[Call]:
    yield lambda: torch.zeros_like(a)
    yield lambda: torch.full_like(a, _NUMBER)
    yield lambda: a.clone().add_(b, alpha=_NUMBER)
    yield lambda: a.clone().mul_(b)
    yield lambda: a.clone().mul_(_NUMBER)
    yield lambda: a.clone().addcmul_(a, b, value=_NUMBER)
    yield lambda: a.clone().addcdiv_(a, b, value=_NUMBER)
    yield lambda: a.clone().lerp_(b, _NUMBER)


def _call(call: Call) -> None:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # PyTorch has it in other dtypes
        call()

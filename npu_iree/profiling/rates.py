"""What the machine can do at most: its matrix products and its memory, by PyTorch's own kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

_MATMUL, _BYTES, _ROUNDS = 2048, 1 << 30, 10


def machine_rates() -> dict[str, float]:
    """Measure PyTorch's matrix products and the reading of memory, the best of some rounds.

    Of its two libraries, oneDNN is the faster on AMD's CPUs (on a Zen 5 twice as fast as MKL).
    """
    data = torch.ones(_BYTES // 4)
    seconds = min(map(_best, _products()))
    return {
        "matmul_gflops": 2 * _MATMUL**3 / seconds / 1e9,
        "read_gb_per_s": _BYTES / _best(data.sum) / 1e9,
    }


def _products() -> Iterator[Callable[[], object]]:
    """Give a product of two matrices as each of the libraries computes it."""
    a, b = torch.randn(_MATMUL, _MATMUL), torch.randn(_MATMUL, _MATMUL)
    yield lambda: a @ b
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        x, weight = a.to_mkldnn(), b.to_mkldnn()
        yield lambda: torch.ops.aten.mkldnn_linear(x, weight)


def _best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)

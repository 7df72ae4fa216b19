"""What the machine can do at most: its matrix products and its memory, by PyTorch's own kernels."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_MATMUL, _BYTES, _ROUNDS = 2048, 1 << 30, 10


def machine_rates() -> dict[str, float]:
    """Measure PyTorch's own matrix product and the reading of memory, the best of some rounds."""
    a, b = torch.randn(_MATMUL, _MATMUL), torch.randn(_MATMUL, _MATMUL)
    data = torch.ones(_BYTES // 4)
    return {
        "matmul_gflops": 2 * _MATMUL**3 / _best(lambda: a @ b) / 1e9,
        "read_gb_per_s": _BYTES / _best(data.sum) / 1e9,
    }


def _best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)

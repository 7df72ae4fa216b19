"""What a launch of an eager op on "npu" costs the host, in microseconds; kernels are warm.

python ci/bench_eager.py              print the table
python ci/bench_eager.py --limit 25   exit code 1 if an op without a layout to change costs more
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import npu_iree

CALLS, ROUNDS = 300, 30


def cost_us(call: Callable[[], object]) -> float:
    """Return the least mean of any round: the others shared the machine."""
    for _ in range(CALLS):
        call()
    best = float("inf")
    for _ in range(ROUNDS):
        torch.npu.synchronize()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - started) / CALLS)
    return best * 1e6


def main() -> int:
    """Measure tiny ops with and without a ledger."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=float("inf"), help="microseconds")
    limit = parser.parse_args().limit
    npu_iree.register_device()
    a, b = torch.randn(3, 4).npu(), torch.randn(3, 4).npu()
    c, square = a.clone(), torch.randn(4, 4).npu()
    calls: dict[str, Callable[[], object]] = {
        "a + b": lambda: a + b,
        "a + 1.5": lambda: a + 1.5,
        "relu(a)": lambda: torch.relu(a),
        "c.add_(b)": lambda: c.add_(b),
        "a @ square": lambda: a @ square,
    }
    found = {name: cost_us(call) for name, call in calls.items()}
    with npu_iree.record_transfers():
        found["a + b, recorded"] = cost_us(calls["a + b"])
    for name, cost in found.items():
        print(f"{name:20s} {cost:6.1f} us")
    return int(max(found.values()) > limit)


if __name__ == "__main__":
    raise SystemExit(main())

"""CPU -> npu -> npu -> CPU over batches: what overlaps, and the time against one batch at a time.

python ci/bench_pipeline.py                     the ratio, and how long uploads overlapped compute
python ci/bench_pipeline.py --timeline          and when each piece of work began and ended
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

import npu_iree
from npu_iree.recording import Span, Timeline

BATCHES, ROUNDS = 8, 5
ROWS, WIDTH = 1024, 1536  # so that a batch computes for longer than it is prepared
Batch = torch.Tensor


def op1(batch: Batch) -> Batch:
    """Prepare a batch, on the CPU."""
    return torch.tanh(torch.sin(batch) * 3).cos()


def op2(batch: Batch) -> Batch:
    """Compute, on "npu"."""
    return batch @ WEIGHTS[0]


def op3(batch: Batch) -> Batch:
    """Compute more of it, on "npu"."""
    return torch.relu(batch @ WEIGHTS[1])


def op4(batch: Batch) -> Batch:
    """Use a result, on the CPU."""
    return torch.log1p(batch.abs()).sum(1)


WEIGHTS: list[torch.Tensor] = []


def submit(batch: Batch) -> Batch:
    """Send a batch through both ops; nothing waits."""
    return op3(op2(op1(batch).to("npu", non_blocking=True)))


def serial(batches: Sequence[Batch]) -> list[Batch]:
    """Take the batches one at a time."""
    return [op4(submit(batch).to("cpu")) for batch in batches]


def pipelined(batches: Sequence[Batch]) -> list[Batch]:
    """Submit the next batch before the result of this one is looked at."""
    ahead: deque[Batch] = deque()
    results = []
    for batch in batches:
        ahead.append(submit(batch))
        if len(ahead) > 1:
            results.append(op4(ahead.popleft().to("cpu")))
    return [*results, *(op4(batch.to("cpu")) for batch in ahead)]


def best_s(run: Callable[[Sequence[Batch]], list[Batch]], batches: Sequence[Batch]) -> float:
    """Return the time of the best of some rounds: others share the machine."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run(batches)
        times.append(time.perf_counter() - started)
    return min(times)


def uploads_beside_compute(timeline: Timeline) -> list[tuple[float, Span]]:
    """Return, for each upload but the first, how long compute of earlier batches ran beside it."""
    puts = [s for s in timeline.spans if s.name.startswith("put")]
    compute = [s for s in timeline.spans if s.name.startswith("aten")]
    return [
        (sum(p.overlap_s(c) for c in compute if c.submitted_s < p.submitted_s), p) for p in puts[1:]
    ]


def main() -> None:
    """Measure both ways, and look at the timeline of the second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeline", action="store_true")
    shows_timeline = parser.parse_args().timeline
    torch.set_num_threads(1)  # the device's threads are on the same cores
    npu_iree.register_device("npu-virtual")
    WEIGHTS.extend(torch.randn(WIDTH, WIDTH).to("npu") / WIDTH**0.5 for _ in range(2))
    batches = [torch.randn(ROWS, WIDTH) for _ in range(BATCHES)]
    for one, other in zip(serial(batches), pipelined(batches), strict=True):
        torch.testing.assert_close(one, other)
    one_at_a_time, together = best_s(serial, batches), best_s(pipelined, batches)
    with npu_iree.record_timeline() as timeline:
        pipelined(batches)
    if shows_timeline:
        print(timeline)
    found = uploads_beside_compute(timeline)
    beside = sum(seconds > 0 for seconds, _ in found)
    print(f"uploads that ran beside the compute of earlier batches: {beside} of {len(found)}")
    print(f"  milliseconds each: {', '.join(f'{s * 1e3:.2f}' for s, _ in found)}")
    print(f"one at a time {one_at_a_time * 1e3:.1f} ms, pipelined {together * 1e3:.1f} ms")
    print(f"ratio {together / one_at_a_time:.2f}")


if __name__ == "__main__":
    main()

"""An asyncio program with 100 requests in flight over a compiled model on "npu".

Prints the longest time for which the event loop did nothing else than one callback, by the clock
and by the loop thread's own CPU time (the clock also counts what other processes took of the core).

python ci/bench_asyncio.py              print it
python ci/bench_asyncio.py --limit 10   exit code 1 if a callback took longer, in milliseconds
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import torch
from torch import nn

import npu_iree

REQUESTS, ROUNDS = 100, 5


def watch_callbacks(found: list[tuple[float, float]]) -> Any:
    """Let each callback of any event loop be measured; returns what undoes it."""
    run: Any = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        clock, own = time.perf_counter(), time.thread_time()
        run(handle)
        found.append((time.perf_counter() - clock, time.thread_time() - own))

    asyncio.Handle._run = measured  # type: ignore[method-assign]
    return lambda: setattr(asyncio.Handle, "_run", run)


async def serve(compiled: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Answer all requests at the same time."""

    async def request(x: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0)  # the others arrive, too
        with torch.no_grad():
            y = compiled(x.to("npu"))
        return (await npu_iree.ready(y)).cpu()

    return await asyncio.gather(*map(request, inputs))


def main() -> int:
    """Measure some rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=float("inf"), help="milliseconds")
    limit = parser.parse_args().limit
    npu_iree.register_device()
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 64))
    inputs = [torch.randn(16, 256) for _ in range(REQUESTS)]
    expected = [model(x).detach() for x in inputs]
    compiled = torch.compile(model.to("npu"), backend="npu_iree")
    asyncio.run(serve(compiled, inputs[:2]))
    worst = 0.0
    for _ in range(ROUNDS):
        found: list[tuple[float, float]] = []
        undo = watch_callbacks(found)
        started = time.perf_counter()
        answers = asyncio.run(serve(compiled, inputs))
        took = time.perf_counter() - started
        undo()
        for answer, right in zip(answers, expected, strict=True):
            torch.testing.assert_close(answer, right, rtol=1e-4, atol=1e-5)
        longest, own = max(c for c, _ in found) * 1e3, max(o for _, o in found) * 1e3
        worst = max(worst, longest)
        print(
            f"{REQUESTS} requests in {took * 1e3:.1f} ms, {len(found)} callbacks: the longest "
            f"{longest:.2f} ms ({own:.2f} ms of CPU time)"
        )
    return int(worst > limit)


if __name__ == "__main__":
    raise SystemExit(main())

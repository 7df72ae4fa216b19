"""`model.py NAME`: one model of the zoo in a fresh process; answers with counters and times."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parent.parent))

from models.zoo import ZOO, flatten
from npu_iree import aot_graph, toolchain
from npu_iree.runner import Runner


class Clock:
    """Adds up the time inside of `compile_graph` and of the first run of what it gives."""

    def __init__(self) -> None:
        self.compile_s = self.first_run_s = 0.0
        compile_graph, call = aot_graph.compile_graph, Runner.__call__
        seen: set[int] = set()

        def timed_compile(*args: Any) -> Runner:
            started = time.perf_counter()
            runner = compile_graph(*args)
            self.compile_s += time.perf_counter() - started
            return runner

        def timed_call(runner: Runner, *args: Any) -> list[Any]:
            started = time.perf_counter()
            results = call(runner, *args)
            if id(runner) not in seen:
                seen.add(id(runner))
                self.first_run_s += time.perf_counter() - started
            return results

        aot_graph.compile_graph = timed_compile
        Runner.__call__ = timed_call  # type: ignore[method-assign]


def main() -> None:
    (entry,) = (m for m in ZOO if m.name == sys.argv[1])
    model, inputs, clock = entry.build(), entry.inputs(), Clock()
    compiled = torch.compile(model, backend="npu_iree")
    with torch.no_grad():
        started = time.perf_counter()
        actual = flatten(compiled(**inputs))
        first_call_s = time.perf_counter() - started
        expected = flatten(model(**inputs))
    away = [(actual[n] - e).abs().max() / e.abs().max() for n, e in expected.items()]
    answer = {
        "away": float(max(away)),
        "counts": dict(counters["npu_iree"]),
        "started": toolchain.compile_service().started,
        "compilers": [m for m in ("torch_mlir", "iree.compiler") if m in sys.modules],
        "first_call_s": first_call_s,
        "compile_s": clock.compile_s,
        "first_run_s": clock.first_run_s,
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

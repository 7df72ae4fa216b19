"""Where the time of the benchmark's models goes: their device programs, the longest first.

python ci/profile_models.py resnet50 --batch 8 --json profiles.json    (adds to what is there)
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benching.limits import ARGUMENTS, MODULE, WEIGHTS, export_module
from benching.models import MODELS
from lowering.abi import ENTRY
from lowering.dispatches import list_dispatches
from lowering.files import write_atomically
from lowering.pipeline import Toolchain
from lowering.program import Program
from npu_iree.profiling.profile import WARM_UP, Row, shares
from npu_iree.profiling.rates import machine_rates
from npu_iree.profiling.recorded import Recorded
from npu_iree.profiling.tools import record_calls
from npu_iree.runner import Runner
from npu_iree.targets import find_target

TARGET = find_target("npu-local")


def profile(name: str, batch: int, calls: int, dynamic: bool | None) -> tuple[Row, ...]:
    """Compile a model, and record its calls in IREE's own runner.

    Raises:
        SystemExit: it is more than one region.
    """
    case = MODELS[name]
    model = torch.compile(case.build(), backend="npu_iree", dynamic=dynamic)
    call = case.call(model, case.inputs(batch))
    call()
    with tempfile.TemporaryDirectory() as folder:
        recorded = Recorded.of(_records(Path(folder), call, calls))
    (runner,) = (o for o in gc.get_objects() if type(o) is Runner)
    (region,) = runner.plan.regions.values()
    flags = runner.executables[region.name].artifact.flags
    known = list_dispatches(Program.of(region), TARGET.compile, flags, Toolchain())
    return shares(recorded, calls, known, machine_rates())


def _records(folder: Path, call: Callable[[], Any], calls: int) -> list[dict[str, Any]]:
    if problem := export_module(folder, call):
        raise SystemExit(problem)
    parameters = folder / WEIGHTS
    return record_calls(
        folder / MODULE,
        ENTRY,
        torch.load(folder / ARGUMENTS),
        driver=TARGET.driver,
        parameters=parameters if parameters.exists() else None,
        calls=calls + WARM_UP,
    )


def main() -> None:
    """Profile the models that are named; print their longest programs, and write a JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("models", nargs="+", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    add("--batch", type=int, default=1)
    add("--dynamic", action="store_true", default=None, help="of unknown sizes")
    add("--calls", type=int, default=10, help="that are counted")
    add("--top", type=int, default=12, help="how many device programs are told")
    add("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    found = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for name in args.models:
        with torch.no_grad():
            rows = profile(name, args.batch, args.calls, args.dynamic)
        torch._dynamo.reset()  # else the next model is looked for among the runners of this one
        gc.collect()
        case = f"{name} x{args.batch}" + " dynamic" * bool(args.dynamic)
        print(f"{case}: {sum(r.seconds for r in rows) * 1e3:.2f} ms of device work")
        for row in rows[: args.top]:
            ops = ", ".join(dict.fromkeys(op for op, _ in row.ops))
            limit = f"{row.of_limit:.0%} {row.limit}" if row.of_limit is not None else ""
            print(
                f"{row.name:66s} {row.runs:4g} {row.seconds * 1e3:9.3f} ms {row.share:6.1%} "
                f"{limit:12s} {ops[:80]}"
            )
        found[case] = [_brief(row) for row in rows[: args.top]]
        if args.json:  # a later model may fail
            write_atomically(args.json, f"{json.dumps(found, indent=1)}\n".encode())


def _brief(row: Row) -> dict[str, Any]:
    """Return what is kept of a row: without the lines, which are of installed packages."""
    return {
        "name": row.name,
        "runs": row.runs,
        "ms": round(row.seconds * 1e3, 4),
        "share": round(row.share, 4),
        "of_limit": row.of_limit and round(row.of_limit, 3),
        "limit": row.limit,
        "ops": list(dict.fromkeys(op for op, _ in row.ops)),
    }


if __name__ == "__main__":
    main()

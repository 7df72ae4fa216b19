"""Measure calls against eager and Inductor: ratios within one run, rounds interleaved.

python ci/bench.py                  every case
python ci/bench.py call linear      some
python ci/bench.py --json out.json  the figures as data, too

python ci/bench.py --models bert vit --backends npu_iree inductor --json out.json --plot out.png

measures whole models, each pair in processes of its own (`benching.suite`): a call in inference, or
with --training a step, with --dynamic compiled for any sizes; run again with the same file, it goes
on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benching import report, suite
from benching.backends import BACKENDS as MODEL_BACKENDS
from benching.backends import DYNAMIC, INFERENCE, STATIC, TRAINING
from benching.turns import turns
from lowering.cpu import host_cpu
from lowering.files import write_atomically
from npu_iree.profiling.rates import machine_rates

BACKENDS = ("npu_iree", "inductor")
Call = Callable[[], object]


@dataclass(frozen=True)
class Figure:
    """One measured line: medians over rounds, in microseconds; ratios are medians of rounds."""

    case: str
    backend: str
    median_us: float
    spread_us: float
    ratio_to_eager: float
    note: str = ""


def measure(calls: dict[str, Call], rounds: int, repeat: int) -> dict[str, list[float]]:
    """Time each call `repeat` times a round, all of them in every round; microseconds a call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for name in turns(list(calls), rounds):
        started = time.perf_counter()
        for _ in range(repeat):
            calls[name]()
        times[name].append((time.perf_counter() - started) / repeat * 1e6)
    return times


def figures(case: str, times: dict[str, list[float]]) -> list[Figure]:
    """Turn rounds into figures; the ratio is taken within each round."""
    return [
        Figure(
            case,
            name,
            statistics.median(values),
            statistics.quantiles(values, n=4)[2] - statistics.quantiles(values, n=4)[0],
            statistics.median(v / e for v, e in zip(values, times["eager"], strict=True)),
        )
        for name, values in times.items()
    ]


def compiled(function: Callable[..., object], *args: object) -> dict[str, Call]:
    """Give the calls to compare: eager and each backend, on the same arguments."""
    calls: dict[str, Call] = {"eager": lambda: function(*args)}
    for backend in BACKENDS:
        fast = torch.compile(function, backend=backend)
        calls[backend] = lambda fast=fast: fast(*args)  # type: ignore[misc]
    return calls


def call() -> list[Figure]:
    """What one call costs: a one-element add, and the same without Dynamo's guards.

    The guards are what `backend="eager"` costs over the add itself.
    """
    x = torch.ones(1)

    def add(value: torch.Tensor) -> torch.Tensor:
        return value + 1

    calls = compiled(add, x)
    guarded = torch.compile(add, backend="eager")
    calls["dynamo alone"] = lambda: guarded(x)
    times = measure(calls, rounds=25, repeat=400)
    guards = [g - e for g, e in zip(times["dynamo alone"], times["eager"], strict=True)]
    times["npu_iree without guards"] = [
        t - g for t, g in zip(times["npu_iree"], guards, strict=True)
    ]
    return figures("one-element add", times)


def linear() -> list[Figure]:
    """A batch-1 Linear 4096x4096: whether weights are read in place, once."""
    model, x = torch.nn.Linear(4096, 4096), torch.randn(1, 4096)
    return figures("linear 4096 batch 1", measure(compiled(model, x), rounds=15, repeat=50))


def mlp() -> list[Figure]:
    """An MLP 512-2048-512 at batch 64."""
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)
    )
    x = torch.randn(64, 512)
    return figures("mlp 512-2048-512 batch 64", measure(compiled(model, x), rounds=15, repeat=10))


CASES = {"call": call, "linear": linear, "mlp": mlp}


def parse() -> argparse.Namespace:
    """Read the command line."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0])
    add = parser.add_argument
    add("cases", nargs="*", help=f"of {', '.join(CASES)}")
    add("--json", type=Path, help="file for the figures")
    add("--models", nargs="+", help="measure whole models instead: names, or `all`")
    add("--backends", nargs="+", choices=MODEL_BACKENDS, default=list(MODEL_BACKENDS))
    add("--batch", nargs="+", type=int, default=[1])
    add("--training", action="store_true", help="a step: forward, loss and gradients")
    add("--dynamic", action="store_true", help="compiled with dynamic=True")
    add("--rounds", type=int, default=7, help="2 or more: a spread is told, too")
    add("--seconds", type=float, default=0.5, help="of one backend in one round")
    add("--python", nargs="+", default=[], metavar="BACKEND=PATH", help="interpreters of peers")
    add("--tune", choices=("off", "quick", "full"), default="off", help="for our own backend")
    add("--plot", type=Path, help="PNG of all that is in the JSON file (needs matplotlib)")
    args = parser.parse_args()
    if args.rounds < 2 or not args.seconds > 0:
        parser.error("--rounds is 2 or more, and --seconds above 0")
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")
    return args


def run_cases(args: argparse.Namespace) -> None:
    """Run the cases that were asked for, print a table, and write JSON if asked to."""
    found: list[Figure] = []
    print(f"{'case':28} {'backend':24} {'us/call':>12} {'+-':>10} {'of eager':>9}")
    with torch.no_grad():
        for name in args.cases or CASES:
            for figure in CASES[name]():
                found.append(figure)
                print(
                    f"{figure.case:28} {figure.backend:24} {figure.median_us:12.1f} "
                    f"{figure.spread_us:10.1f} {figure.ratio_to_eager:9.2f}"
                )
    if args.json:
        run = {"machine": platform.processor(), "threads": torch.get_num_threads()}
        text = json.dumps({**run, "figures": [asdict(f) for f in found]}, indent=1)
        write_atomically(args.json, text.encode())


def run_models(args: argparse.Namespace) -> None:
    """Measure whole models; keep each one's figures as soon as they are there."""
    from benching.models import MODELS

    known = args.json is not None and args.json.exists()
    run = json.loads(args.json.read_text()) if known else {"machine": machine(), "cases": {}}
    plan = suite.Plan(
        backends=tuple(dict.fromkeys(["eager", *args.backends])),
        rounds=args.rounds,
        seconds=args.seconds,
        pythons=dict(pair.split("=", 1) for pair in args.python),
        options={} if args.tune == "off" else {"tune": args.tune},
        mode=TRAINING if args.training else INFERENCE,
        sizes=DYNAMIC if args.dynamic else STATIC,
    )
    able = {n: m for n, m in MODELS.items() if not args.training or m.training is not None}
    names = list(able) if args.models == ["all"] else args.models
    if unknown := set(names) - set(able):
        raise SystemExit(f"no model {', '.join(sorted(unknown))}; there are: {', '.join(able)}")
    here = json.loads(json.dumps(asdict(plan)))  # as the file has it
    how = " training" * args.training + " dynamic" * args.dynamic
    asked = {f"{n} x{batch}{how}": (n, batch) for batch in args.batch for n in names}
    if asked.keys() - run["cases"]:
        _refuse_another_machine(run["machine"])
        for case in asked.keys() & run.get("settings", {}).keys():
            _refuse_other_settings(case, run["settings"][case], here)
    for case, (name, batch) in asked.items():
        if case in run["cases"]:
            continue
        figures = suite.as_json(suite.measure(name, batch, plan))
        run.setdefault("settings", {})[case], run["cases"][case] = here, figures
        run.setdefault("load_average", {})[case] = os.getloadavg()
        print(report.table({case: figures}), flush=True)
        if args.json:
            write_atomically(args.json, json.dumps(run, indent=1).encode())
    print(report.summary(run["cases"]))
    if args.plot:
        report.plot(run["cases"], args.plot)


def _refuse_another_machine(measured: Mapping[str, object]) -> None:
    here = {"cpu": host_cpu(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    _refuse_other_settings("what is there", {name: measured.get(name) for name in here}, here)


def _refuse_other_settings(
    case: str, before: Mapping[str, object], here: Mapping[str, object]
) -> None:
    """End where a file has figures that were measured in another way; those of old do not say."""
    if names := [name for name in here if before.get(name) != here[name]]:
        differ = ", ".join(f"{name} {before.get(name)}, not {here[name]}" for name in names)
        raise SystemExit(f"{case} was measured otherwise ({differ}); take another file")


def machine() -> dict[str, object]:
    """Say what it was measured on, and what that machine can do at most."""
    rates = machine_rates()
    return {
        "cpu": host_cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **rates,
    }


if __name__ == "__main__":
    arguments = parse()
    (run_models if arguments.models else run_cases)(arguments)

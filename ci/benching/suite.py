"""Runs pairs in turns: first calls, cold and warm, then rounds; ratios within a round."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benching.limits import benchmark_module

CI = Path(__file__).parent.parent
LIMIT = "iree-benchmark-module"
FIRST_CALL_ONLY = ("aot_eager",)
OURS = "npu_iree"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and how long.

    Attributes:
        backends: their names; `eager` is always among them.
        rounds: how often each is timed.
        seconds: of one backend in one round.
        mode: what a call is, `INFERENCE` or `TRAINING`.
        sizes: what is compiled for, `STATIC` or `DYNAMIC`.
        pythons: backend -> the interpreter that has it, if it is not this one.
        options: of `torch.compile`, for our own backend.
    """

    backends: Sequence[str]
    rounds: int
    seconds: float
    mode: str
    sizes: str
    pythons: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Row:
    """What one backend did with one model; times of rounds in milliseconds a call.

    Attributes:
        missing: why it was not measured; else empty.
        cold_s: the first call, all caches empty.
        warm_s: the first call of another process, all caches full.
        cold_peak_mb: resident memory in the process that compiled, at most.
        peak_mb: the same in the one that did not.
        difference: from eager's numbers, relative to the largest of a tensor.
        rounds_ms: a call, in each round.
        ms: their median.
        spread_ms: between their quartiles.
        of_eager: ratio to eager's time in the same round, median.
        inside_ms: of our own calls in each round, what our runner takes; the rest is PyTorch's:
            Dynamo's guards, what loads the parameters, and wrappers.
    """

    missing: str = ""
    cold_s: float | None = None
    warm_s: float | None = None
    cold_peak_mb: float | None = None
    peak_mb: float | None = None
    difference: float | None = None
    rounds_ms: list[float] = field(default_factory=list)
    ms: float | None = None
    spread_ms: float | None = None
    of_eager: float | None = None
    inside_ms: list[float] = field(default_factory=list)


class _Child:
    """A process with one model on one backend."""

    def __init__(self, model: str, batch: int, backend: str, plan: Plan, caches: Path) -> None:
        options = json.dumps(dict(plan.options) if backend == OURS else {})
        python = plan.pythons.get(backend, sys.executable)
        path = os.pathsep.join([str(CI), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {
            **os.environ,
            "PYTHONPATH": path,
            "NPU_IREE_CACHE": str(caches / "npu_iree"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        }
        asked = [model, str(batch), backend, options, plan.mode, plan.sizes]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [python, "-m", "benching.pair", *asked],
            stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=env,
        )  # fmt: skip
        self.first = self._answer()

    def ask(self, *words: object) -> dict[str, Any]:
        """Send a command and return its answer; one without an answer has ended the process."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(" ".join(map(str, words)) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # a backend may print
                return dict(json.loads(line))
        return {"failed": f"its process ended with {self._process.wait()}"}

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def measure(model: str, batch: int, plan: Plan) -> dict[str, Row]:
    """Measure one model on all backends; return a row for each."""
    rows = {name: Row() for name in plan.backends}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        for name, row in rows.items():
            with _child(model, batch, name, plan, folder / name) as child:
                row.missing = child.first.get("missing") or child.first.get("failed") or ""
                row.cold_s = child.first.get("first_call_s")
                row.cold_peak_mb = child.first.get("peak_mb")
        children: dict[str, _Child] = {}
        try:
            for name in (n for n, row in rows.items() if not row.missing):
                children[name] = _Child(model, batch, name, plan, folder / name)
                rows[name].warm_s = children[name].first.get("first_call_s")
                rows[name].missing = children[name].first.get("failed", "")
            _compare(children, rows, folder)
            if OURS in children:
                rows[LIMIT] = _limit(children[OURS], folder)
            _rounds(children, _side_by_side(rows), plan, folder)
        finally:
            for child in children.values():
                child.end()
    _settle(rows)
    return rows


@contextmanager
def _child(model: str, batch: int, backend: str, plan: Plan, caches: Path) -> Iterator[_Child]:
    child = _Child(model, batch, backend, plan, caches)
    try:
        yield child
    finally:
        child.end()


def _compare(children: Mapping[str, _Child], rows: Mapping[str, Row], folder: Path) -> None:
    """Note the peak of memory, then compare the numbers with eager's."""
    for name, child in children.items():
        rows[name].peak_mb = child.ask("memory").get("peak_mb")
    children["eager"].ask("save", folder / "expected.pt")
    for name, child in children.items():
        answer = child.ask("compare", folder / "expected.pt")
        rows[name].difference = answer.get("difference")
        rows[name].missing = answer.get("failed", "")


def _limit(ours: _Child, folder: Path) -> Row:
    """Have our module written for IREE's own tool."""
    (folder / "module").mkdir()
    answer = ours.ask("export", folder / "module")
    return Row(missing=answer.get("failed") or answer.get("module") or "")


def _rounds(
    children: Mapping[str, _Child], rows: Mapping[str, Row], plan: Plan, folder: Path
) -> None:
    timed = [n for n, r in rows.items() if not r.missing and n not in FIRST_CALL_ONLY]
    for i in range(plan.rounds):
        for name in timed if i % 2 == 0 else reversed(timed):
            if rows[name].missing:
                continue
            answer = _time(name, children, plan.seconds, folder)
            rows[name].missing = answer.get("failed", "")
            rows[name].rounds_ms += [float(answer["ms"])] if "ms" in answer else []
            if name == OURS and not rows[OURS].missing:
                inside = children[OURS].ask("inside", plan.seconds)
                rows[OURS].missing = inside.get("failed", "")
                rows[OURS].inside_ms += [float(inside["ms"])] if "ms" in inside else []


def _side_by_side(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Put the limit next to ours: of all that is compared, the closest to each other."""
    names = [name for name in rows if name != LIMIT]
    if LIMIT in rows:
        names.insert(names.index(OURS) + 1, LIMIT)
    return {name: rows[name] for name in names}


def _time(
    name: str, children: Mapping[str, _Child], seconds: float, folder: Path
) -> dict[str, Any]:
    if name != LIMIT:
        return children[name].ask("round", seconds)
    try:
        return {"ms": benchmark_module(folder / "module", seconds)}
    except subprocess.CalledProcessError as error:
        return {"failed": f"{LIMIT} ended with {error.returncode}"}


def _settle(rows: Mapping[str, Row]) -> None:
    """Sum rounds up; one that died in some round has no figures, and none has ratios to it."""
    for row in rows.values():
        if row.missing:
            row.rounds_ms, row.inside_ms = [], []
    eager = rows["eager"].rounds_ms
    for row in rows.values():
        if len(row.rounds_ms) > 1:
            low, _, high = statistics.quantiles(row.rounds_ms, n=4)
            row.ms, row.spread_ms = statistics.median(row.rounds_ms), high - low
        if len(row.rounds_ms) > 1 and eager:
            row.of_eager = statistics.median(
                a / b for a, b in zip(row.rounds_ms, eager, strict=True)
            )


def as_json(rows: Mapping[str, Row]) -> dict[str, Any]:
    """Return rows as plain values."""
    return {name: asdict(row) for name, row in rows.items()}

"""Measures the candidates of a tuning on the device, in a process that may crash or hang."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from lowering.cache import Entry
from lowering.errors import MeasureError
from lowering.own_python import start_own
from lowering.program import Program
from lowering.region import Region, value_spec
from lowering.signature import TensorSpec
from lowering.sizes import size_hint
from lowering.tuning import DEFAULT, Trial, Tuning
from npu_iree.targets import Target

BUDGET_S = {"quick": 1.0, "full": 3.0}  # of timing a candidate, beyond the least rounds
_NOISE = 0.02  # what two copies of a module may be apart at least
_SILENCE_S = 120.0  # after which a module hangs
_SAID = "said.txt"  # what the process that measures writes to stdout and stderr
_ALONE = threading.Lock()


def tuning_for(level: str, target: Target) -> Tuning | None:
    """Return what tunes programs for a target; None where the level is `off`."""
    return None if level == "off" else Tuning(level=level, measure=DeviceMeasure(target))


@dataclass(frozen=True)
class DeviceMeasure:
    """Times modules on a target's device; one program at a time."""

    target: Target
    silence_s: float = _SILENCE_S

    def __call__(
        self, program: Program, modules: Mapping[str, Entry], level: str
    ) -> tuple[dict[str, Trial], float]:
        """Return a trial for each module, and the noise of the measurement.

        Raises:
            OSError: there is no place for files, or there can be no more processes.
            MeasureError: the device does not open, or the default does not run.
        """
        with tempfile.TemporaryDirectory(prefix="npu-iree-") as scratch, _ALONE:
            folder = Path(scratch)
            (folder / "program.json").write_text(json.dumps(_described(program, self.target)))
            for name, entry in modules.items():
                (folder / f"{name}.vmfb").write_bytes(entry.vmfb)
            rows = self._rows(folder, list(modules), BUDGET_S[level])
        trials = {name: Trial(name=name, flags=(), **row) for name, row in rows.items()}
        default = trials[DEFAULT]
        if default.ratio is None or default.worst_ratio is None:
            return trials, 1.0
        return trials, max(_NOISE, abs(default.ratio - 1), abs(default.worst_ratio - 1))

    def _rows(
        self, folder: Path, names: Sequence[str], budget_s: float
    ) -> dict[str, dict[str, Any]]:
        """Look at every module; after one that ends the process, another goes on with the rest."""
        found: dict[str, dict[str, Any]] = {}
        while left := [name for name in names if name not in found]:
            current, problem = DEFAULT, "the process that measures does not start"
            for row in _answers(folder, left, budget_s, self.silence_s):
                if "begin" in row:
                    it = "the default" if row["begin"] == DEFAULT else "it"
                    current, problem = row["begin"], f"running {it} ends the process"
                elif "failed" in row:
                    raise MeasureError(row["failed"])
                elif row:
                    found[row.pop("name")] = row
                else:
                    problem = f"it does not end within {self.silence_s:g} s"
            if why := found.get(DEFAULT, {}).get("problem"):
                return {name: {"problem": f"the default: {why}"} for name in names}
            if current == DEFAULT and not found.keys() >= set(left):
                raise MeasureError(f"{problem}{_last_words(folder)}")
            found.setdefault(current, {"problem": problem})
        return found


def _answers(
    folder: Path, names: Sequence[str], budget_s: float, silence_s: float
) -> Iterator[dict[str, Any]]:
    """Start `npu_iree.timing`, and give its answers; the last is empty if it fell silent."""
    null, args = subprocess.DEVNULL, (str(folder), str(budget_s), *names)
    with (folder / _SAID).open("wb") as said:
        process, answers = start_own("npu_iree.timing", *args, output=said, stdin=null)
    with process, answers:
        try:
            poll, rest = select.poll(), b""  # `select.select` takes no descriptor above 1023
            poll.register(answers, select.POLLIN)
            while poll.poll(silence_s * 1e3):
                # Not line by line: of those that Python has read ahead, `poll` knows nothing.
                if not (found := os.read(answers.fileno(), 1 << 16)):
                    return
                *lines, rest = (rest + found).split(b"\n")
                yield from map(json.loads, lines)
            yield {}
        finally:
            process.kill()


def _last_words(folder: Path) -> str:
    """Return the last line that the process has written, e.g. what ended it; or nothing."""
    said = (folder / _SAID).read_text(errors="replace").split("\n")
    last = next(filter(str.strip, reversed(said)), "")
    return f" ({last.strip()[:300]})" if last else ""


def _described(program: Program, target: Target) -> dict[str, Any]:
    """Say what a program takes and gives, with numbers for symbolic sizes."""
    regions = program.regions
    return {
        "target": target.name,
        "driver": target.driver,
        "memory": target.memory,
        "entries": {name: _signature(region) for name, region in regions.items()},
        "parameters": {name: region.parameter_names for name, region in regions.items()},
        "scalars": {name: _scalars(region) for name, region in regions.items()},
    }


def _signature(region: Region) -> dict[str, Any]:
    signature = region.signature
    return {
        "inputs": [_spec(n) for n in region.inputs],
        "parameters": [_spec(n) for n in region.parameters],
        "outputs": [asdict(spec) for spec in signature.outputs],
        "checks": [asdict(check) for check in signature.checks],
    }


def _spec(node: fx.Node) -> dict[str, Any]:
    spec = value_spec(node.meta["val"])
    row = asdict(spec)
    if isinstance(spec, TensorSpec):
        row["shape"] = [size_hint(size) for size in node.meta["val"].shape]
    return row


def _scalars(region: Region) -> list[int | float | bool]:
    values = [node.meta["val"] for node in region.inputs]
    return [_number(v) for v in values if not isinstance(v, torch.Tensor)]


def _number(value: Any) -> int | float | bool:
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return 1.0 if isinstance(value, torch.SymFloat) else True
    number: int | float | bool = value
    return number

"""`npu_iree.timing DESCRIPTOR FOLDER SECONDS NAME...`: run modules of one program, and time them.

A process of its own, so that a module that crashes or hangs costs one candidate of a tuning
(`npu_iree.tuning`). It reads `program.json` and `NAME.vmfb`, and answers with JSON lines: `begin`
with a name before it touches a module, then what was found; or `failed` with the reason, where
nothing can be, as there is no device or the default does not run.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowering.artifact import Artifact, EntryPoint
from lowering.dtypes import DTYPES
from lowering.errors import first_line
from lowering.signature import Check, ScalarSpec, Signature, TensorSpec
from lowering.target import CompileTarget
from lowering.tuning import DEFAULT
from npu_iree.device import Device, open_device
from npu_iree.errors import NpuIreeError
from npu_iree.executable import Executable
from npu_iree.function import Function
from npu_iree.targets import ABI_FLAGS, Target
from npu_iree.timeline import wait_all
from npu_iree.tolerances import largest_difference, tolerance

LEAST_ROUNDS, MOST_ROUNDS = 8, 200
HOPELESS = 1.5  # what takes so many times the default's time in its first rounds is left alone
_ROUND_S = 0.005  # of each side; a shorter call is repeated
FAILURES = (NpuIreeError, RuntimeError)  # of the device: ours, and IREE's
Answer = Callable[..., object]
Values = dict[str, list[torch.Tensor | int | float | bool]]


@dataclass(frozen=True)
class SyntheticProgram:
    """A program to run: what it takes, in the order of memory, with numbers for symbolic sizes.

    Attributes:
        entries: by name.
        parameters: entry -> the names of its parameters.
        scalars: entry -> the numbers among its inputs, in order.
        target: what it is for.
    """

    entries: Mapping[str, EntryPoint]
    parameters: Mapping[str, Sequence[str]]
    scalars: Mapping[str, Sequence[int | float | bool]]
    target: Target

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> SyntheticProgram:
        """Read what `npu_iree.tuning` wrote."""
        target = Target(
            compile=CompileTarget(name=row["target"], flag_sets=(ABI_FLAGS,)),
            driver=row["driver"],
            memory=row["memory"],
        )
        entries = {name: EntryPoint(_signature(s)) for name, s in row["entries"].items()}
        return cls(entries, row["parameters"], row["scalars"], target)

    def inputs(self) -> Values:
        """Make up the arguments of a call of each entry point: the same at every call."""
        torch.manual_seed(0)
        made: Values = {}
        for name, entry in self.entries.items():
            numbers = iter(self.scalars[name])
            made[name] = [
                synthetic(s) if isinstance(s, TensorSpec) else next(numbers)
                for s in entry.signature.inputs
            ]
        return made

    def weights(self) -> dict[str, torch.Tensor]:
        """Make up the parameters: the same at every call."""
        torch.manual_seed(1)
        return {
            name: synthetic(spec, is_weight=True)
            for entry, names in self.parameters.items()
            for name, spec in zip(names, self.entries[entry].signature.parameters, strict=True)
        }


def synthetic(spec: TensorSpec, is_weight: bool = False) -> torch.Tensor:
    """Make up a tensor, dense in its order of memory.

    Numbers stay in a range that a deep network neither blows up nor lets vanish: vectors of weights
    (scales, biases, variances) are about 1, matrices keep the size of what they multiply. Integers
    are 0 or 1: they may be indices.
    """
    shape, dtype = [int(spec.shape[d]) for d in spec.order], DTYPES[spec.dtype]
    if dtype is torch.bool:
        return torch.rand(shape) < 0.9
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2, shape).to(dtype)
    if is_weight and len(shape) < 2:
        return (torch.rand(shape) + 0.5).to(dtype)
    values = torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    return (values / math.sqrt(_fan_in(spec)) if is_weight else values).to(dtype)


def _fan_in(spec: TensorSpec) -> int:
    sizes = [int(size) for size in spec.shape]
    return max(1, max(sizes) if len(sizes) == 2 else math.prod(sizes[1:]))


class Runnable:
    """A module of the program, loaded: call it to run all its entry points once, and wait."""

    def __init__(self, device: Device, program: SyntheticProgram, vmfb: bytes) -> None:
        executable = Executable(device, Artifact("candidate", vmfb, program.entries))
        if any(program.parameters.values()):
            weights = program.weights()
            executable.load({n: device.memory.parameter(tensor) for n, tensor in weights.items()})
        values = program.inputs()
        self._calls: list[tuple[Function, list[Any]]] = [
            (executable.functions[name], [_put(device, v) for v in values[name]])
            for name in program.entries
        ]
        self._device = device

    def __call__(self) -> list[Any]:
        """Run it once; return the handles of all results."""
        results = [array for function, args in self._calls for array in function(*args)]
        wait_all([array.ready for array in results])
        return results

    def results(self) -> list[torch.Tensor]:
        """Run it once; return copies of all results."""
        return [tensor.clone() for tensor in self._device.fetch(self())]

    def seconds(self, repeat: int) -> float:
        """Time a call, the mean of `repeat` ones."""
        started = time.perf_counter()
        for _ in range(repeat):
            self()
        return (time.perf_counter() - started) / repeat


def compare(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> tuple[float, str]:
    """Return the largest difference, and what is wrong with the results; empty: nothing."""
    worst, problem = 0.0, ""
    for actual, wanted in zip(results, expected, strict=True):
        difference = largest_difference(actual, wanted)
        if difference > worst or math.isnan(difference):
            worst = difference
        if not difference <= tolerance(wanted.dtype)[0]:
            problem = f"its results are {difference:.1e} away from the default's"
    return worst, problem


def is_telling(results: Sequence[torch.Tensor]) -> bool:
    """Say whether results can show that another module computes other numbers."""
    floats = [r for r in results if r.dtype.is_floating_point or r.dtype.is_complex]
    return all(bool(r.isfinite().float().mean() > 0.5) for r in floats if r.numel())


def ratios(one: Runnable, other: Runnable, budget_s: float) -> list[tuple[float, float]]:
    """Time two modules in turns; return the seconds of each in every round."""
    once = max(one.seconds(1), other.seconds(1))
    repeat = max(1, int(_ROUND_S / max(once, 1e-6)))
    rounds: list[tuple[float, float]] = []
    ends = time.perf_counter() + budget_s
    while len(rounds) < MOST_ROUNDS and (len(rounds) < LEAST_ROUNDS or time.perf_counter() < ends):
        if len(rounds) % 2:  # who comes first changes: the other finds its caches cold
            second, first = other.seconds(repeat), one.seconds(repeat)
        else:
            first, second = one.seconds(repeat), other.seconds(repeat)
        rounds.append((first, second))
        if len(rounds) == 4 and min(b / a for a, b in rounds) > HOPELESS:
            break
    return rounds


def told(rounds: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the figures of a comparison.

    Lower quartiles are compared, and those of the two halves of the rounds, too: where other
    processes share the machine, they stay what they are longer than medians do.
    """
    half = len(rounds) // 2
    return {
        "ms": _lower_quartile([other for _, other in rounds]) * 1e3,
        "default_ms": _lower_quartile([one for one, _ in rounds]) * 1e3,
        "ratio": _ratio(rounds),
        "worst_ratio": max(_ratio(rounds[:half]), _ratio(rounds[half:])),
    }


def _ratio(rounds: Sequence[tuple[float, float]]) -> float:
    one, other = zip(*rounds, strict=True)
    return _lower_quartile(other) / _lower_quartile(one)


def _lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def run(folder: Path, names: Sequence[str], budget_s: float, answer: Answer) -> None:
    """Check and time modules against the default, one after the other; tell what is found."""
    program = SyntheticProgram.from_json(json.loads((folder / "program.json").read_text()))
    try:
        device = open_device(program.target)
        answer(begin=DEFAULT)
        default = Runnable(device, program, (folder / f"{DEFAULT}.vmfb").read_bytes())
        expected = default.results()
    except FAILURES as error:
        answer(failed=first_line(error))
        return
    if not is_telling(expected):
        answer(name=DEFAULT, problem="made-up inputs give no finite results to compare")
        return
    default()
    if DEFAULT in names:
        same = Runnable(device, program, (folder / f"{DEFAULT}.vmfb").read_bytes())
        answer(name=DEFAULT, difference=0.0, **told(ratios(default, same, budget_s)))
    for name in names:
        if name != DEFAULT:
            answer(begin=name)
            _try(device, program, folder, name, default, expected, budget_s, answer)


def _try(
    device: Device,
    program: SyntheticProgram,
    folder: Path,
    name: str,
    default: Runnable,
    expected: Sequence[torch.Tensor],
    budget_s: float,
    answer: Answer,
) -> None:
    try:
        candidate = Runnable(device, program, (folder / f"{name}.vmfb").read_bytes())
        difference, problem = compare(candidate.results(), expected)
    except FAILURES as error:
        answer(name=name, problem=f"it fails: {first_line(error)}")
        return
    if problem:
        answer(name=name, difference=difference, problem=problem)
        return
    answer(name=name, difference=difference, **told(ratios(default, candidate, budget_s)))


def _put(device: Device, value: Any) -> Any:
    return device.put(value) if isinstance(value, torch.Tensor) else value


def _signature(row: Mapping[str, Any]) -> Signature:
    inputs, parameters, outputs = (
        tuple(map(_spec, row[kind])) for kind in ("inputs", "parameters", "outputs")
    )
    checks = tuple(Check(**check) for check in row["checks"])
    return Signature(inputs, parameters, outputs, checks)  # type: ignore[arg-type]


def _spec(row: Mapping[str, Any]) -> TensorSpec | ScalarSpec:
    if "shape" not in row:
        return ScalarSpec(row["dtype"])
    return TensorSpec(row["dtype"], tuple(row["shape"]), tuple(row["order"]))


def main(descriptor: str, folder: str, budget_s: str, *names: str) -> None:
    """Run modules, and write what is found to a descriptor."""
    with open(int(descriptor), "w", buffering=1) as answers:  # 1: line by line
        run(
            Path(folder),
            names,
            float(budget_s),
            lambda **row: answers.write(f"{json.dumps(row)}\n"),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])

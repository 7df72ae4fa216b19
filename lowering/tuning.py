"""Tuning: a program compiled with each candidate of its target, measured, and the best one kept.

How a program is measured is the caller's: `lowering` opens no device.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from lowering.at_once import at_once
from lowering.cache import Entry
from lowering.errors import MeasureError, StageError
from lowering.key import named_files
from lowering.pipeline import Toolchain, compile_source
from lowering.program import Program
from lowering.target import Candidate, CompileTarget, FlagSet

log = logging.getLogger(__name__)

DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one candidate.

    Attributes:
        name: of the candidate; `default` is what is taken without tuning.
        flags: what it was compiled with.
        ms: a call, lower quartile of all rounds; None if it was not timed.
        default_ms: a call of the default in the same rounds.
        ratio: of the two.
        worst_ratio: the same for the half of the rounds in which it is larger.
        difference: largest difference from the default's results, relative to the largest value.
        compile_ms: what compiling it took.
        problem: why it cannot win: it fails, crashes, hangs or computes other numbers; else empty.
    """

    name: str
    flags: FlagSet
    ms: float | None = None
    default_ms: float | None = None
    ratio: float | None = None
    worst_ratio: float | None = None
    difference: float | None = None
    compile_ms: float = 0.0
    problem: str = ""

    def wins(self, noise: float) -> bool:
        """Say whether it is faster than the default by more than noise."""
        if self.problem or self.ratio is None or self.worst_ratio is None:
            return False
        return self.ratio < 1 - noise and self.worst_ratio < 1


@dataclass(frozen=True, kw_only=True)
class TuningRecord:
    """How the settings of a program were chosen.

    Attributes:
        level: `quick` or `full`.
        winner: name of the candidate that was taken.
        noise: how far two copies of the default were apart, as a share of its time.
        cost_ms: what tuning took.
        trials: all candidates, the default first.
    """

    level: str
    winner: str
    noise: float
    cost_ms: float
    trials: tuple[Trial, ...]

    @property
    def pays_back_calls(self) -> int | None:
        """After how many calls the time that tuning took is won back; None: never.

        What the default differs from itself by is noise, and wins nothing.
        """
        won = next((t for t in self.trials if t.name == self.winner != DEFAULT), None)
        if won is None or won.ms is None or won.default_ms is None or won.ms >= won.default_ms:
            return None
        return round(self.cost_ms / (won.default_ms - won.ms))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {**asdict(self), "pays_back_calls": self.pays_back_calls}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> TuningRecord:
        """Read what `to_json` made.

        Raises:
            KeyError, TypeError, ValueError: it makes no sense.
        """
        trials = tuple(Trial(**{**t, "flags": tuple(t["flags"])}) for t in row["trials"])
        return cls(
            level=str(row["level"]),
            winner=str(row["winner"]),
            noise=float(row["noise"]),
            cost_ms=float(row["cost_ms"]),
            trials=trials,
        )


class Measure(Protocol):
    """Times modules of one program against the first of them, and compares their results."""

    def __call__(
        self, program: Program, modules: Mapping[str, Entry], level: str
    ) -> tuple[dict[str, Trial], float]:
        """Return a trial for each module, and how far two copies of the first are apart.

        Raises:
            OSError: there is no place for files, or there can be no more processes.
            MeasureError: there is no device, or the first of them does not run.
        """


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What tunes programs.

    Attributes:
        level: `quick` or `full`: how many candidates are tried, and how long.
        measure: times them.
    """

    level: str
    measure: Measure

    def candidates(self, target: CompileTarget, extra: FlagSet = ()) -> tuple[Candidate, ...]:
        """Return what is tried, with the user's own flags."""
        return tuple(
            replace(c, flags=(*c.flags, *extra))
            for c in target.candidates
            if c.is_quick or self.level == "full"
        )

    def key(self, target: CompileTarget) -> str:
        """Return what of it decides which settings are taken, as part of a key."""
        flag_sets = [c.flags for c in self.candidates(target)]
        return json.dumps([self.level, [*flag_sets, *named_files(flag_sets)]])

    def tuned(
        self, program: Program, default: Entry, target: CompileTarget, toolchain: Toolchain
    ) -> Entry:
        """Return a program's entry with the best settings, and the record of how they were found.

        Args:
            program: what it is of.
            default: what it is compiled into without tuning.
            target: lists the candidates.
            toolchain: compiles them.
        """
        started = time.perf_counter()
        others = [
            c
            for c in self.candidates(target, toolchain.flags)
            if c.flags != default.flags and c.traits <= program.traits
        ]
        modules, trials = {DEFAULT: default}, {DEFAULT: Trial(name=DEFAULT, flags=default.flags)}
        compiled = _compiled(default, others, toolchain)
        for candidate, (built, ms) in zip(others, compiled, strict=True):
            trial = Trial(name=candidate.name, flags=candidate.flags, compile_ms=ms)
            if isinstance(built, StageError):
                trials[candidate.name] = replace(trial, problem=built.summary)
            else:
                trials[candidate.name] = trial
                modules[candidate.name] = replace(default, flags=candidate.flags, vmfb=built)
        try:
            measured, noise = self.measure(program, modules, self.level)
        except (OSError, MeasureError) as error:
            log.warning("the default settings are taken, as nothing can be measured: %s", error)
            return replace(default, is_lasting=False)
        for name, found in measured.items():
            known = trials[name]
            trials[name] = replace(found, flags=known.flags, compile_ms=known.compile_ms)
        record = TuningRecord(
            level=self.level,
            winner=_winner(trials.values(), noise),
            noise=noise,
            cost_ms=(time.perf_counter() - started) * 1e3,
            trials=tuple(trials.values()),
        )
        is_passing = any(isinstance(b, StageError) and b.is_passing for b, _ in compiled)
        return replace(
            modules[record.winner],
            tuning=record.to_json(),
            is_lasting=default.is_lasting and not is_passing,
        )


def _winner(trials: Iterable[Trial], noise: float) -> str:
    ratios = {t.name: t.ratio or 0.0 for t in trials if t.wins(noise)}
    return min(ratios, key=ratios.__getitem__, default=DEFAULT)


def _compiled(
    default: Entry, candidates: Sequence[Candidate], toolchain: Toolchain
) -> list[tuple[bytes | StageError, float]]:
    """Compile a program with each candidate, as many at a time as there are workers."""

    def compile_with(candidate: Candidate, by: Toolchain) -> tuple[bytes | StageError, float]:
        started = time.perf_counter()
        options = replace(default.options, flags=candidate.flags)
        built: bytes | StageError
        try:
            built = compile_source(default.source, options, by)
        except StageError as error:
            built = error
        return built, (time.perf_counter() - started) * 1e3

    return at_once(compile_with, candidates, toolchain)

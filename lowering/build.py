"""Get the modules of regions: from a bundle, the cache, or the stages, in parallel."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lowering.at_once import at_once
from lowering.bundle import Bundle
from lowering.cache import ArtifactCache, Entry
from lowering.errors import FlagError, StageError
from lowering.key import CacheKey, program_key
from lowering.pipeline import Toolchain, compile_program
from lowering.program import Program
from lowering.region import Region
from lowering.target import CompileTarget
from lowering.tuning import Tuning
from lowering.worker import allowed_memory

log = logging.getLogger(__name__)
_COUNTING = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Builder:
    """Compiles regions for one target.

    Attributes:
        target: what to compile for.
        toolchain: where the stages run.
        bundle: what was saved for this model, or None; it is asked first.
        cache: store of artifacts, or None.
        may_compile: whether what neither has is compiled.
        dump: folder for the products of the stages, or None; with it, the cache is not asked for
            what may be compiled.
        counts: `compiles`, `bundle_hits`, `cache_hits`, `cache_misses`, `compile_ms`,
            `refused_flags` and `tuned_regions` are added up here.
        tuning: chooses the settings of each region by measuring, or None.
    """

    target: CompileTarget
    toolchain: Toolchain = field(default_factory=Toolchain)
    bundle: Bundle | None = None
    cache: ArtifactCache | None = None
    may_compile: bool = True
    dump: Path | None = None
    counts: Counter[str] = field(default_factory=Counter)
    tuning: Tuning | None = None

    def key(self, region: Region) -> CacheKey:
        """Return the key of a region."""
        return self.program_key(Program.of(region))

    def program_key(self, program: Program) -> CacheKey:
        """Return the key of a program."""
        tune = self.tuning.key(self.target) if self.tuning is not None else ""
        toolchain = self.toolchain
        return program_key(program, self.target, toolchain.flags, toolchain.kernels, tune)

    def program(self, program: Program) -> Entry:
        """Get the module of a program.

        Raises:
            StageError: the compiler refused it.
        """
        key = self.program_key(program)
        built = self._load(key) or self._compile(program, key)
        if isinstance(built, StageError):
            raise built
        return built

    def build(self, regions: Sequence[Region]) -> dict[str, Entry | StageError | None]:
        """Get the module of each region, or how the compiler refused it; equal ones once.

        None is what would have to be compiled, and may not be.
        """
        keys = {region.name: self.key(region) for region in regions}
        different = {keys[r.name].digest: r for r in reversed(regions)}
        built: dict[str, Entry | StageError | None] = {}
        missing: list[Region] = []
        for digest, region in different.items():
            entry = self._load(keys[region.name])
            if entry is None and self.may_compile:
                missing.append(region)
            else:
                built[digest] = entry
        built |= self._compile_all(missing, keys)
        return {r.name: built[keys[r.name].digest] for r in regions}

    @property
    def limits(self) -> str:
        """What a stage may take, as denials name it."""
        limits = self.toolchain.limits
        return f"{limits.time_s:g} s, {allowed_memory(limits.memory_bytes)} bytes"

    def attempt(self, region: Region, dump: Path | None) -> StageError | None:
        """Compile a region only to see how it fails; None means that it does not."""
        outcome = self._run_stages(Program.of(region), dump)
        return outcome if isinstance(outcome, StageError) else None

    def _load(self, key: CacheKey) -> Entry | None:
        if self.bundle is not None and (entry := self.bundle.entry(key)):
            self._count("bundle_hits", 1)
            return entry
        if self.cache is None or (self.dump is not None and self.may_compile):
            return None  # what is loaded leaves nothing to dump
        entry = self.cache.load(key)
        if entry is not None:
            self._count("cache_hits", 1)
        return entry

    def _compile_all(
        self, regions: Sequence[Region], keys: dict[str, CacheKey]
    ) -> dict[str, Entry | StageError]:
        programs = {keys[r.name].digest: Program.of(r) for r in regions}
        if self.tuning is not None:  # measured alone
            return {d: self._compile(p, keys[p.name]) for d, p in programs.items()}

        def compile_by(program: Program, toolchain: Toolchain) -> Entry | StageError:
            return replace(self, toolchain=toolchain)._compile(program, keys[program.name])

        built = at_once(compile_by, list(programs.values()), self.toolchain)
        return dict(zip(programs, built, strict=True))

    def _compile(self, program: Program, key: CacheKey) -> Entry | StageError:
        dump = self.dump / program.name if self.dump is not None else None
        if self.cache is None:
            return self._make(program, dump, key)
        with self.cache.lock(key, self.toolchain.cancelled):
            if entry := self._load(key):  # another process was faster
                return entry
            self._count("cache_misses", 1)
            if log.isEnabledFor(logging.DEBUG):
                log.debug(
                    "%s: no entry; the nearest differs in %s", program.name, self.cache.nearest(key)
                )
            built = self._make(program, dump, key)
            if isinstance(built, Entry) and built.is_lasting:
                self.cache.store(key, built)
            return built

    def _make(self, program: Program, dump: Path | None, key: CacheKey) -> Entry | StageError:
        """Compile a program, and tune it if that is asked for."""
        if self.tuning is None:
            return self._run_stages(program, dump, key)
        plain = replace(self, tuning=None)
        plain_key = plain.program_key(program)
        default = plain._load(plain_key) or plain._compile(program, plain_key)
        if isinstance(default, StageError):
            return default
        self._count("tuned_regions", 1)
        tuned = self.tuning.tuned(program, default, self.target, self.toolchain)
        return replace(tuned, parts=key.parts)

    def _run_stages(
        self, program: Program, dump: Path | None, key: CacheKey | None = None
    ) -> Entry | StageError:
        started = time.perf_counter()
        try:
            module = compile_program(program, self.target, self.toolchain, dump)
        except FlagError:  # which no other program would fare better with
            raise
        except StageError as error:
            return error
        finally:
            elapsed_ms = round((time.perf_counter() - started) * 1e3)
            self._count("compiles", 1)
            self._count("compile_ms", elapsed_ms)
            log.info("%s: compiled in %d ms", program.name, elapsed_ms)
        if module.refused:
            self._count("refused_flags", module.refused)
        parts = key.parts if key else {}
        return Entry(
            parts,
            module.flags,
            module.vmfb,
            module.source,
            module.cpu_features,
            is_lasting=module.is_lasting,
        )

    def _count(self, name: str, number: int) -> None:
        with _COUNTING:
            self.counts[name] += number

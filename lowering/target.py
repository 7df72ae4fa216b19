"""What the compiler may know of a target, as one frozen value: also its part of a cache key."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

FlagSet = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings that a region may be compiled with.

    Attributes:
        name: for records and reports, e.g. `channels-last`.
        flags: the whole `iree-compile` flag set.
        is_quick: whether `tune="quick"` tries it, too.
        traits: what a region has (`lowering.traits`) for which it makes a difference.
    """

    name: str
    flags: FlagSet
    is_quick: bool = False
    traits: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What fits regions of a kind, as measured (`ci/measure_flags.py`).

    Attributes:
        traits: what such a region has, all of it (`lowering.traits`).
        candidates: names of the candidates to compile it with, the best first.
    """

    traits: frozenset[str]
    candidates: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """The part of a target that may change the bytes of a .vmfb.

    Attributes:
        name: name of the target, as in `options={"target": name}`.
        flag_sets: `iree-compile` flags, tried in this order; the first set that compiles a region
            is taken. A set that fails is not an error while another one is left.
        candidates: other settings that are worth a try, for `choices` and for tuning.
        choices: which of them are tried before `flag_sets`; the first row that fits is taken.
        capabilities: the capability table: a file name in `lowering/capabilities`, or the path of
            a TOML file of a vendor's own package.
        keep_ops: ATen ops (`aten.name` or `aten.name.overload`) that are not decomposed.
        rewrites: which of `lowering.rewrites.RULES` and `FORMS` pay on it.
    """

    name: str
    flag_sets: tuple[FlagSet, ...]
    candidates: tuple[Candidate, ...] = ()
    choices: tuple[Choice, ...] = ()
    capabilities: str = "npu-local.toml"
    keep_ops: frozenset[str] = frozenset()
    rewrites: tuple[str, ...] = ()

    def flag_sets_for(
        self, traits: Collection[str] = (), extra: FlagSet = ()
    ) -> tuple[FlagSet, ...]:
        """Return the flag sets to try for a region, best first; `extra` is the user's own."""
        flags = {candidate.name: candidate.flags for candidate in self.candidates}
        chosen = next((c.candidates for c in self.choices if c.traits.issubset(traits)), ())
        sets = dict.fromkeys([*(flags[name] for name in chosen), *self.flag_sets])
        return tuple((*flag_set, *extra) for flag_set in sets)

    def replacing(self, flag: str, other: str) -> CompileTarget:
        """Return the same target with one flag for another, wherever it is."""

        def changed(flags: FlagSet) -> FlagSet:
            return tuple(other if f == flag else f for f in flags)

        return replace(
            self,
            flag_sets=tuple(map(changed, self.flag_sets)),
            candidates=tuple(replace(c, flags=changed(c.flags)) for c in self.candidates),
        )

"""The table of targets, and the entry point by which other packages add theirs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Literal

from lowering.cpu import THIS_CPU
from lowering.rewrites import FORMS, RULES
from lowering.suggest import suggested
from lowering.target import Candidate, Choice, CompileTarget, FlagSet
from npu_iree.errors import FOREIGN, TargetError

ENTRY_POINT_GROUP = "npu_iree.targets"
_MEMORIES = ("unified", "discrete")
_log = logging.getLogger(__name__)

# Flags that are part of the contract between compiler and runtime, whatever the code generator:
# fences in and out of each call, and the dtypes that the user wrote.
ABI_FLAGS = (
    "--iree-execution-model=async-external",
    "--iree-input-demote-f64-to-f32=false",
)
# Bytes of the stack that a device program may use, of the 8 MB that a thread has on Linux: twice
# IREE's own limit. What packs two layouts of attention's scores (their gradients), or unpacks what
# a GELU has read and made, takes 33 to 54 KB.
_STACK = 65536
_LLVM_CPU = (
    *ABI_FLAGS,
    "--iree-hal-target-backends=llvm-cpu",
    THIS_CPU,
    f"--iree-llvmcpu-stack-allocation-limit={_STACK}",
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to compile for and what to run on.

    Attributes:
        compile: what the compiler may know: flags, capabilities, decompositions.
        driver: IREE HAL device URI, e.g. `local-task` or `cuda://0`.
        inline_driver: URI of a device on the same memory, for the same code, that works on the
            calling thread: for calls so small that waking another takes longer. Empty: none.
        memory: `unified` if host tensors can be device buffers as they are; `discrete` if every
            import and export is a copy through a staging buffer.
        alignment_bytes: what an address must be a multiple of to be used in place.
        max_in_flight: how many submitted calls may be unfinished before a submission waits.
        max_in_flight_bytes: how many bytes of their results may be.
    """

    compile: CompileTarget
    driver: str
    inline_driver: str = ""
    memory: Literal["unified", "discrete"]
    alignment_bytes: int = 64
    max_in_flight: int = 256
    max_in_flight_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        """Check what would be found out in the middle of a call.

        Raises:
            TargetError: a value is none that a target can have.
        """
        alignment, flag_sets = self.alignment_bytes, self.compile.flag_sets
        claims = {
            f"memory is one of {', '.join(_MEMORIES)}, not {self.memory!r}": (
                self.memory in _MEMORIES
            ),
            f"driver is the URI of an IREE device, not {self.driver!r}": bool(self.driver),
            f"alignment_bytes is a power of two, not {alignment}": (
                alignment > 0 and not alignment & (alignment - 1)
            ),
            "max_in_flight and max_in_flight_bytes are above 0": (
                min(self.max_in_flight, self.max_in_flight_bytes) > 0
            ),
            f"flag_sets are tuples of flags, each a text with -- before it, not {flag_sets!r}": (
                all(map(_are_flags, flag_sets))
            ),
            "flag_sets has a set of flags": bool(flag_sets),
            **_bound(f"each set of flag_sets has {_ABI}", flag_sets),
            **_bound(f"each of candidates has {_ABI}", (c.flags for c in self.compile.candidates)),
            **_known("a rewrite", self.compile.rewrites, {*RULES, *FORMS}),
            **_known(
                "a candidate of its choices",
                (name for choice in self.compile.choices for name in choice.candidates),
                {candidate.name for candidate in self.compile.candidates},
            ),
        }
        for claim, is_true in claims.items():
            if not is_true:
                raise TargetError(f"target {self.name!r}: {claim}")

    @property
    def name(self) -> str:
        """The target's name."""
        return self.compile.name


_ABI = f"ABI_FLAGS ({' '.join(ABI_FLAGS)}), and no other value for them"


def against_abi(flags: Iterable[str]) -> list[str]:
    """Return those of some flags that set what `ABI_FLAGS` does to something else."""
    names = {_name(flag) for flag in ABI_FLAGS}
    return [f for f in flags if _name(f) in names and f not in ABI_FLAGS]


def _name(flag: str) -> str:
    return flag.partition("=")[0]


def _bound(claim: str, flag_sets: Iterable[FlagSet]) -> dict[str, bool]:
    """Return what is claimed of sets of flags: that calls work with them."""
    return {
        f"{claim}, not {flags!r}": (
            _are_flags(flags) and {*ABI_FLAGS} <= {*flags} and not against_abi(flags)
        )
        for flags in flag_sets
    }


def _are_flags(flags: object) -> bool:
    return isinstance(flags, tuple) and all(isinstance(f, str) and f[:2] == "--" for f in flags)


def _known(what: str, names: Iterable[str], known: Collection[str]) -> dict[str, bool]:
    """Return what is claimed of names: that they are known."""
    listed = ", ".join(sorted(known)) or "none"
    return {f"{name!r} is {what}; there are: {listed}": name in known for name in names}


# `iree-compile --iree-opt-level=O2` would set this, too; in a session, that does nothing (3.13).
# Without it, a row is added up number by number: ViT takes 1.05 of the time, Whisper 1.06.
_LANES = (*_LLVM_CPU, "--iree-llvmcpu-reassociate-fp-reductions=true")
_TILED = (*_LANES, "--iree-opt-data-tiling")
# Of float32, the loop of a product that is generated reads ahead
# (`lowering.stages.code.read_ahead`) and is faster than IREE's own kernel; that of bfloat16 takes
# twice as long as the kernel. The kernel that unpacks is never called: where 16 does not divide the
# rows, or the columns, of a result, each of its tiles is read and written again, number by number,
# before the call and after it. With it, Whisper takes 1.17 of the time, MobileNetV2 1.1.
_UKERNELS = (*_TILED, "--iree-llvmcpu-enable-ukernels=mmt4d,pack")
_PACKED = (*_TILED, "--iree-llvmcpu-enable-ukernels=pack")
_CHANNELS_LAST = (
    "--iree-preprocessing-pass-pipeline=builtin.module(util.func("
    "iree-preprocessing-convert-conv-to-channels-last))",
)
_IM2COL = ("--iree-global-opt-use-im2col-for-convs",)
_DISPATCH_TILED = (*_LANES, "--iree-dispatch-creation-data-tiling")
_FUSED = (*_PACKED, "--iree-dispatch-creation-enable-aggressive-fusion")

_CPU_FLAG_SETS = (_UKERNELS, _LANES, _LLVM_CPU)
_CONVOLUTION = frozenset({"convolution"})
_FLOAT32 = frozenset({"float32"})
_CPU_CANDIDATES = (
    Candidate(name="ukernels", flags=_UKERNELS, is_quick=True),
    Candidate(name="packed", flags=_PACKED, is_quick=True, traits=_FLOAT32),
    Candidate(name="fused", flags=_FUSED, traits=_FLOAT32),
    Candidate(name="tiled", flags=_TILED),
    Candidate(name="dispatch-tiled", flags=_DISPATCH_TILED, is_quick=True),
    Candidate(name="im2col", flags=(*_UKERNELS, *_IM2COL), is_quick=True, traits=_CONVOLUTION),
    Candidate(
        name="im2col-packed",
        flags=(*_PACKED, *_IM2COL),
        is_quick=True,
        traits=_CONVOLUTION | _FLOAT32,
    ),
    Candidate(
        name="channels-last",
        flags=(*_UKERNELS, *_CHANNELS_LAST),
        is_quick=True,
        traits=_CONVOLUTION,
    ),
    Candidate(
        name="channels-last-packed",
        flags=(*_PACKED, *_CHANNELS_LAST),
        is_quick=True,
        traits=_CONVOLUTION | _FLOAT32,
    ),
    Candidate(name="channels-last-untiled", flags=(*_LANES, *_CHANNELS_LAST), traits=_CONVOLUTION),
    Candidate(name="untiled", flags=_LANES, is_quick=True),
    Candidate(name="none", flags=_LLVM_CPU),
)
# What of a kind of region was fastest (`ci/measure_flags.py`). Convolutions that are not rewritten
# as products (`lowering.rewrites.convolutions`) are best with channels last.
_CPU_CHOICES = (
    Choice(traits=_CONVOLUTION | _FLOAT32, candidates=("channels-last-packed",)),
    Choice(traits=_CONVOLUTION, candidates=("im2col",)),
    Choice(traits=_FLOAT32, candidates=("packed",)),
)
_CPU: dict[str, Any] = {
    "flag_sets": _CPU_FLAG_SETS,
    "candidates": _CPU_CANDIDATES,
    "choices": _CPU_CHOICES,
    "rewrites": ("broadcasts", "convolutions", "products", "sums", "channels_last", "matrices"),
}

NPU_LOCAL = Target(
    compile=CompileTarget(name="npu-local", **_CPU),
    driver="local-task",
    inline_driver="local-sync",
    memory="unified",
)
NPU_VIRTUAL = Target(
    compile=CompileTarget(name="npu-virtual", **_CPU), driver="local-task", memory="discrete"
)
CUDA = Target(
    compile=CompileTarget(
        name="cuda",
        # sm_89: iree-compile 3.13 cannot emit sm_90; newer chips run the older code.
        flag_sets=((*ABI_FLAGS, "--iree-hal-target-backends=cuda", "--iree-cuda-target=sm_89"),),
    ),
    driver="cuda",
    memory="discrete",
)
_OURS = {target.name: target for target in (NPU_LOCAL, NPU_VIRTUAL, CUDA)}


def targets() -> dict[str, Target]:
    """Return every installed target by name, ours and those of other packages.

    An entry point that cannot be loaded, that is no `Target`, whose name is taken or not that of
    its target, is told of in a warning, once; the other targets are there.
    """
    return dict(_installed()[0])


@cache
def _installed() -> tuple[dict[str, Target], dict[str, str]]:
    """Load all targets; give them by name, and why others are none by the names of theirs."""
    found = dict(_OURS)
    broken: dict[str, str] = {}
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if problem := _add(found, entry):
            broken[entry.name] = problem
            _log.warning("target %s (%s): %s", entry.name, entry.value, problem)
    return found, broken


def _add(found: dict[str, Target], entry: metadata.EntryPoint) -> str:
    """Load a target, and add it to those found by name; return what is wrong with it, if so."""
    try:
        target = entry.load()
    except FOREIGN as error:
        return f"it cannot be loaded: {type(error).__name__}: {error}"
    if not isinstance(target, Target):
        return f"it is no npu_iree.Target but {type(target).__name__}"
    if _OURS.get(target.name, target) is not target:
        return f"{target.name} is built in"
    if found.setdefault(target.name, target) is not target:
        return f"another package defines a target {target.name!r}, too"
    if entry.name != target.name:
        return f"the target of this entry point is named {target.name!r}"
    return ""


def find_target(name: str) -> Target:
    """Return a target by name.

    Raises:
        TargetError: there is none, and the message lists those there are and the near one; or the
            package that has it could not give it, and the message says why.
    """
    table = targets()
    if name in table:
        return table[name]
    if why := _installed()[1].get(name):
        raise TargetError(f"target {name!r}: {why}")
    hint = suggested(name, table)
    raise TargetError(
        f"no target {name!r}.{hint} Installed: {', '.join(sorted(table))}; others come from "
        f"packages with an entry point of the group {ENTRY_POINT_GROUP!r}"
    )


def package_of(name: str) -> str:
    """Return name and version of the package that adds a target; empty: the target is ours."""
    entries = metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
    return ", ".join(f"{e.dist.name} {e.dist.version}" for e in entries if e.dist)

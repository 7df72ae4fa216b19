"""The table of targets, and the entry point by which other packages add theirs."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Literal

from lowering.target import CompileTarget
from npu_iree.errors import TargetError

ENTRY_POINT_GROUP = "npu_iree.targets"

# Flags that are part of the contract between compiler and runtime, whatever the code generator:
# fences in and out of each call, and the dtypes that the user wrote.
ABI_FLAGS = (
    "--iree-execution-model=async-external",
    "--iree-input-demote-f64-to-f32=false",
)
_LLVM_CPU = (
    *ABI_FLAGS,
    "--iree-hal-target-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to compile for and what to run on.

    Attributes:
        compile: what the compiler may know: flags, capabilities, decompositions.
        driver: IREE HAL device URI, e.g. `local-task` or `cuda://0`.
        memory: `unified` if host tensors can be device buffers as they are; `discrete` if every
            import and export is a copy through a staging buffer.
        alignment_bytes: what an address must be a multiple of to be used in place.
        max_in_flight: how many submitted calls may be unfinished before a submission waits.
        max_in_flight_bytes: how many bytes of their results may be.
    """

    compile: CompileTarget
    driver: str
    memory: Literal["unified", "discrete"]
    alignment_bytes: int = 64
    max_in_flight: int = 256
    max_in_flight_bytes: int = 4 << 30

    @property
    def name(self) -> str:
        """The target's name."""
        return self.compile.name


_CPU_FLAG_SETS = (
    (
        *_LLVM_CPU,
        "--iree-opt-level=O3",
        "--iree-opt-data-tiling",
        "--iree-llvmcpu-enable-ukernels=all",
    ),
    (*_LLVM_CPU, "--iree-opt-level=O3"),
    _LLVM_CPU,
)
_CPU_CONV_FLAGS = ("--iree-global-opt-use-im2col-for-convs",)
_CPU_REWRITES = ("convolutions",)

NPU_LOCAL = Target(
    compile=CompileTarget(
        name="npu-local",
        flag_sets=_CPU_FLAG_SETS,
        conv_flags=_CPU_CONV_FLAGS,
        rewrites=_CPU_REWRITES,
    ),
    driver="local-task",
    memory="unified",
)
NPU_VIRTUAL = Target(
    compile=CompileTarget(
        name="npu-virtual",
        flag_sets=_CPU_FLAG_SETS,
        conv_flags=_CPU_CONV_FLAGS,
        rewrites=_CPU_REWRITES,
    ),
    driver="local-task",
    memory="discrete",
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


@cache
def targets() -> dict[str, Target]:
    """Return every installed target by name, ours and those of other packages.

    Raises:
        TargetError: an entry point cannot be loaded or is not a `Target`, or two share a name.
    """
    found = {t.name: t for t in (NPU_LOCAL, NPU_VIRTUAL, CUDA)}
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            target = entry.load()
        except Exception as error:
            raise TargetError(
                f"cannot load target {entry.name!r} ({entry.value}): {error}"
            ) from error
        if not isinstance(target, Target):
            raise TargetError(f"{entry.value} is no npu_iree.Target but {type(target).__name__}")
        if found.setdefault(target.name, target) is not target:
            raise TargetError(f"two packages define a target {target.name!r}; one is {entry.value}")
    return found


def find_target(name: str) -> Target:
    """Return a target by name.

    Raises:
        TargetError: there is none; the message lists those there are and the near one.
    """
    table = targets()
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise TargetError(f"no target {name!r}.{hint} Installed: {', '.join(sorted(table))}")

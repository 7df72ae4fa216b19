"""The default target for a CPU that is named: IR is the same on whatever machine tests run."""

from __future__ import annotations

from lowering.cpu import CPU_FLAG, THIS_CPU
from lowering.target import CompileTarget
from npu_iree.targets import NPU_LOCAL


def target_for(cpu: str) -> CompileTarget:
    """The target for a CPU by LLVM's name; what it compiles need not run here."""
    return NPU_LOCAL.compile.replacing(THIS_CPU, f"{CPU_FLAG}{cpu}")


WIDE_CPU = "x86-64-v4"  # vectors of 16 floats
WIDE = target_for(WIDE_CPU)

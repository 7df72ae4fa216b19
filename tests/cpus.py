"""The default target for a CPU that is named: IR is the same on whatever machine tests run."""

from __future__ import annotations

from lowering.target import CompileTarget
from npu_iree.targets import NPU_LOCAL


def target_for(cpu: str) -> CompileTarget:
    """The target for a CPU by LLVM's name; what it compiles need not run here."""
    host = "--iree-llvmcpu-target-cpu=host"
    return NPU_LOCAL.compile.replacing(host, f"--iree-llvmcpu-target-cpu={cpu}")


WIDE = target_for("x86-64-v4")  # vectors of 16 floats

"""Try one op: lower it, compile it, run it on IREE's local-task device, compare it with eager."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from measuring.single_op import SingleOp, program

from lowering.artifact import ENTRY, Artifact
from lowering.dtypes import dtype_name
from lowering.errors import StageError
from lowering.pipeline import compile_region
from lowering.region import extract_region, inverse, memory_order
from lowering.stages.linalg_to_vmfb import LINALG_TO_VMFB
from lowering.target import CompileTarget

RIGHT = "right"
TARGET = CompileTarget(
    name="npu-local",
    flag_sets=(
        (
            "--iree-hal-target-backends=llvm-cpu",
            "--iree-llvmcpu-target-cpu=host",
            "--iree-opt-level=O3",
            "--iree-opt-data-tiling",
            "--iree-llvmcpu-enable-ukernels=all",
            "--iree-input-demote-f64-to-f32=false",
            "--iree-execution-model=async-external",
        ),
    ),
)

# dtype -> (rtol, atol); all others must be equal.
TOLERANCES = {
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (3e-2, 3e-2),
    torch.float32: (1e-4, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1e-4, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
# Their values are whatever was in memory: only dtype and shape can be compared.
VALUELESS = re.compile(r"aten\.(new_)?empty")


@dataclass(frozen=True)
class Verdict:
    """What came of trying one op.

    Attributes:
        reason: `right`, or one line that says what went wrong.
        detail: what the compiler, the runtime or the comparison said.
    """

    reason: str
    detail: str = ""


def judge(single: SingleOp, progress: Callable[[str], None]) -> Verdict:
    """Compile and run one op and compare all its results with eager's.

    Args:
        single: the op.
        progress: called with `compiler` or `program` before the part that may crash or hang.
    """
    made = program(single)
    region = extract_region(made.segment, ())
    progress("compiler")
    try:
        artifact = compile_region(region, TARGET)
    except StageError as error:
        compiles = error.stage == LINALG_TO_VMFB.name
        said = _short(error.diagnostics)
        reason = f"IREE cannot compile it: {said}" if compiles else "torch-mlir cannot lower it"
        return Verdict(reason, error.diagnostics)
    progress("program")
    try:
        results = _run(artifact, [made.inputs[n] for n in region.inputs])
    except RuntimeError as error:
        return Verdict(f"IREE cannot run it: {_short(str(error))}", str(error))
    if VALUELESS.match(single.op):
        results = [torch.zeros_like(r) for r in results]
        return _compare(results, [torch.zeros_like(e) for e in made.expected])
    return _compare(results, made.expected)


def _compare(results: list[torch.Tensor], expected: Any) -> Verdict:
    for result, right in zip(results, expected, strict=True):
        if result.dtype != right.dtype:
            return Verdict(f"gives {dtype_name(result.dtype)}, eager {dtype_name(right.dtype)}")
        if result.shape != right.shape:
            return Verdict("gives another shape than eager", f"{result.shape} {right.shape}")
        rtol, atol = TOLERANCES.get(right.dtype, (0, 0))
        try:
            torch.testing.assert_close(result, right, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            return Verdict("gives other numbers than eager", f"{error}\n{result}\n{right}"[:2000])
    return Verdict(RIGHT)


def _run(artifact: Artifact, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Invoke a module on the coarse-fences ABI and wait for it."""
    from iree.runtime import _binding as hal

    instance, device, hal_module = _device()
    module = hal.VmModule.copy_buffer(instance, artifact.vmfb)
    context = hal.VmContext(instance, [hal_module, module])
    dense = [_to_memory(t) for t in inputs]
    done = hal.HalFence.create_at(device.create_semaphore(0), 1)
    arguments = hal.VmVariantList(len(dense) + 2)
    for tensor in dense:
        arguments.push_ref(_buffer_view(device, tensor).ref)
    arguments.push_ref(hal.HalFence(0).ref)
    arguments.push_ref(done.ref)
    returned = hal.VmVariantList(len(artifact.signature.outputs))
    context.invoke(module.lookup_function(ENTRY), arguments, returned)
    done.wait()
    views = [returned.get_as_object(i, hal.HalBufferView) for i in range(len(returned))]
    specs = artifact.signature.outputs
    return [_from_view(device, v, s) for v, s in zip(views, specs, strict=True)]


@cache
def _device() -> tuple[Any, Any, Any]:
    from iree.runtime import _binding as hal

    hal.disable_leak_checker()
    instance = hal.VmInstance()
    device = hal.get_cached_hal_driver("local-task").create_default_device()
    return instance, device, hal.create_hal_module(instance, device)


def _to_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as the dense, aligned memory that crosses a region's boundary."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.permute(memory_order(tensor)).clone(memory_format=torch.contiguous_format)


def _buffer_view(device: Any, tensor: torch.Tensor) -> Any:
    return device.from_dlpack_capsule(torch.utils.dlpack.to_dlpack(tensor))


def _from_view(device: Any, view: Any, spec: TensorSpec) -> torch.Tensor:
    """Copy a result out; IREE's integers have no sign, so that u8 and bool may come back as i8."""
    memory = torch.utils.dlpack.from_dlpack(device.create_dlpack_capsule(view, 1, 0)).clone()
    dtype = DTYPES[spec.dtype]
    if memory.dtype != dtype and {memory.dtype, dtype} < _BYTES:
        memory = memory.view(dtype)
    return memory.permute(inverse(spec.order))


_BYTES = {torch.int8, torch.uint8, torch.bool}


def _short(text: str) -> str:
    """Take the first line of what a compiler said, without places, types and what varies."""
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    line = re.sub(r"^.*?loc\([^)]*\): |^.*?unknown: |^(error|-):? ", "", line)
    return re.sub(r"\s+", " ", line)[:90]

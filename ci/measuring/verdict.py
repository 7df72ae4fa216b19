"""Try one op: lower it, compile it, run it on IREE's local-task device, compare it with eager."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowering.abi import ENTRY
from lowering.capabilities import NOT_LOWERED
from lowering.decompositions.halves import HALVES
from lowering.dtypes import DTYPES, dtype_name
from lowering.errors import StageError
from lowering.pipeline import compile_program
from lowering.program import Program
from lowering.region import extract_region, memory_order
from lowering.signature import Signature, TensorSpec, inverse
from lowering.stages.aten_to_torch import ATEN_TO_TORCH
from lowering.stages.torch_to_linalg import TORCH_TO_LINALG
from lowering.target import CompileTarget
from measuring.single_op import SingleOp, SingleOpProgram, in_floats, program
from npu_iree.conformance.judge import rounds_as_eager
from npu_iree.targets import NPU_LOCAL
from npu_iree.tolerances import tolerance

RIGHT, OTHER_NUMBERS = "right", "gives other numbers than eager"
TARGET = CompileTarget(name="npu-local", flag_sets=NPU_LOCAL.compile.flag_sets[:1])

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
        vmfb = compile_program(Program.of(region), TARGET).vmfb
    except StageError as error:
        if error.stage in (ATEN_TO_TORCH.name, TORCH_TO_LINALG.name):
            return Verdict(NOT_LOWERED, error.diagnostics)
        return Verdict(f"IREE cannot compile it: {_short(error.diagnostics)}", error.diagnostics)
    progress("program")
    inputs = [_to_memory(made.inputs[n]) for n in region.inputs]
    before = [t.clone() for t in inputs]
    try:
        results = _run(vmfb, region.signature, inputs)
    except RuntimeError as error:
        return Verdict(f"IREE cannot run it: {_short(str(error))}", str(error))
    if _compare(inputs, before).reason != RIGHT:
        return Verdict("writes into its inputs")
    if VALUELESS.match(single.op):
        return _compare([r.zero_() for r in results], [torch.zeros_like(e) for e in made.expected])
    ours, eagers = (_without_ties(made, r) for r in (results, made.expected))
    found = _compare(ours, eagers)
    if found.reason == OTHER_NUMBERS and not HALVES.isdisjoint(t.dtype for t in eagers):
        return _compare_rounded(ours, eagers, _without_ties(made, in_floats(single)))
    return found


def _without_ties(made: SingleOpProgram, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Replace indices of `topk` by what they point at: which of equal values it takes is open."""
    node, *items = made.segment.nodes
    if str(node.target) != "aten.topk.default":
        return list(outputs)
    (source,) = made.inputs.values()
    dim = next((d for d in node.args[2:3] if isinstance(d, int)), -1)
    last = max(source.shape[dim] - 1, 0) if source.dim() else 0
    return [
        source.gather(dim, output.clamp(0, last)) if item.args[1] == 1 else output
        for item, output in zip(items, outputs, strict=True)
    ]


def _compare(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Verdict:
    for result, right in zip(results, expected, strict=True):
        if result.dtype != right.dtype:
            return Verdict(f"gives {dtype_name(result.dtype)}, eager {dtype_name(right.dtype)}")
        if result.shape != right.shape:
            return Verdict("gives another shape than eager", f"{result.shape} {right.shape}")
        rtol, atol = tolerance(right.dtype)
        try:
            torch.testing.assert_close(result, right, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            return Verdict(OTHER_NUMBERS, f"{error}\n{result}\n{right}"[:2000])
    return Verdict(RIGHT)


def _compare_rounded(
    results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> Verdict:
    """Compare halves by how far they, and eager's, are from what wider floats give."""
    for result, right, truth in zip(results, expected, exact, strict=True):
        found = _compare([result], [right])
        if found.reason != RIGHT and not rounds_as_eager(result, right, truth):
            return found
    return Verdict(RIGHT)


def _run(vmfb: bytes, signature: Signature, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Invoke a module on the coarse-fences ABI with dense tensors, and wait for it."""
    from iree.runtime import _binding as hal

    instance, device, hal_module = _device()
    module = hal.VmModule.copy_buffer(instance, vmfb)
    context = hal.VmContext(instance, [hal_module, module])
    done = hal.HalFence.create_at(device.create_semaphore(0), 1)
    arguments = hal.VmVariantList(len(inputs) + 2)
    for tensor in inputs:
        arguments.push_ref(device.from_dlpack_capsule(tensor.__dlpack__()).ref)
    arguments.push_ref(hal.HalFence(0).ref)
    arguments.push_ref(done.ref)
    returned = hal.VmVariantList(len(signature.outputs))
    context.invoke(module.lookup_function(ENTRY), arguments, returned)
    done.wait()
    return [
        _from_view(device, returned.get_as_object(i, hal.HalBufferView), spec)
        for i, spec in enumerate(signature.outputs)  # what else there is keeps inputs alive
    ]


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


def _from_view(device: Any, view: Any, spec: TensorSpec) -> torch.Tensor:
    """Copy a result out; IREE's integers have no sign, so that u8 and bool may come back as i8."""
    memory = torch.utils.dlpack.from_dlpack(device.create_dlpack_capsule(view, 1, 0)).clone()
    dtype = DTYPES[spec.dtype]
    if memory.dtype != dtype and {memory.dtype, dtype} < _BYTES:
        memory = memory.view(dtype)
    return memory.permute(inverse(spec.order))


_BYTES = {torch.int8, torch.uint8, torch.bool}


def _short(text: str) -> str:
    """Take the first line of what a compiler said, without the place and what varies."""
    for pattern, short in SHORT.items():
        if re.search(pattern, text):
            return short
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return re.sub(r"^(loc\(.*?\)+: |unknown: |error: )+", "", line)[:80]


# What IREE says -> what it means, where its first line does not tell.
SHORT = {
    r"failed to link executable": "it calls a math function that the CPU back end does not have",
    r"inferred input/output operand": "shapes do not match",
    r"DISCARD_WRITE": "it writes into an input",
    r"region block must end with a linalg_ext.yield": "malformed top-k",
}

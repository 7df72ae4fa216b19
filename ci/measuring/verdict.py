"""Try one op: lower it, compile it, run it on a target's device, compare it with eager."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from lowering.abi import ENTRY
from lowering.artifact import Artifact, EntryPoint
from lowering.capabilities import NOT_LOWERED
from lowering.decompositions.halves import HALVES
from lowering.dtypes import dtype_name
from lowering.errors import NpuIreeError, StageError, first_line
from lowering.pipeline import compile_program
from lowering.program import Program
from lowering.region import extract_region, memory_order
from lowering.signature import Signature, inverse
from lowering.stages.aten_to_torch import ATEN_TO_TORCH
from lowering.stages.torch_to_linalg import TORCH_TO_LINALG
from lowering.target import CompileTarget
from measuring.single_op import SingleOp, SingleOpProgram, in_floats, program
from npu_iree.conformance.judge import rounds_as_eager
from npu_iree.device import open_device
from npu_iree.executable import Executable
from npu_iree.targets import Target
from npu_iree.tolerances import tolerance

RIGHT, OTHER_NUMBERS = "right", "gives other numbers than eager"

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


def judge(single: SingleOp, progress: Callable[[str], None], target: Target) -> Verdict:
    """Compile and run one op and compare all its results with eager's.

    Args:
        single: the op.
        progress: called with `compiler` or `program` before the part that may crash or hang.
        target: what to compile for, by the first set of its flags alone, and to run on.
    """
    made = program(single)
    region = extract_region(made.segment, ())
    progress("compiler")
    try:
        vmfb = compile_program(Program.of(region), _plain(target.compile)).vmfb
    except StageError as error:
        if error.stage in (ATEN_TO_TORCH.name, TORCH_TO_LINALG.name):
            return Verdict(NOT_LOWERED, error.diagnostics)
        return Verdict(f"IREE cannot compile it: {_short(error.diagnostics)}", error.diagnostics)
    progress("program")
    inputs = [_to_memory(made.inputs[n]) for n in region.inputs]
    try:
        results, after = _run(target, vmfb, region.signature, inputs)
    except (RuntimeError, NpuIreeError) as error:
        return Verdict(f"IREE cannot run it: {_short(str(error))}", str(error))
    if _compare(after, inputs).reason != RIGHT:
        return Verdict("writes into its inputs")
    if VALUELESS.match(single.op):
        return _compare([r.zero_() for r in results], [torch.zeros_like(e) for e in made.expected])
    ours, eagers = (_without_ties(made, r) for r in (results, made.expected))
    found = _compare(ours, eagers)
    if found.reason == OTHER_NUMBERS and not HALVES.isdisjoint(t.dtype for t in eagers):
        return _compare_rounded(ours, eagers, _without_ties(made, in_floats(single)))
    return found


def _plain(target: CompileTarget) -> CompileTarget:
    """Return a target with one set of flags, whatever is compiled, and no rewrites."""
    return replace(target, flag_sets=target.flag_sets[:1], candidates=(), choices=(), rewrites=())


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


def _run(
    target: Target, vmfb: bytes, signature: Signature, inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Call a module with dense tensors; return its results, and what the call has made of these."""
    device = open_device(target)
    executable = Executable(device, Artifact("op", vmfb, {ENTRY: EntryPoint(signature)}))
    arguments = [device.put(tensor) for tensor in inputs]
    results = [t.clone() for t in device.fetch(executable.functions[ENTRY](*arguments))]
    in_order = zip(results, signature.outputs, strict=True)
    after = [t.clone() for t in device.fetch(arguments)]
    return [memory.permute(inverse(spec.order)) for memory, spec in in_order], after


def _to_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as the dense, aligned memory that crosses a region's boundary."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.permute(memory_order(tensor)).clone(memory_format=torch.contiguous_format)


def _short(text: str) -> str:
    """Take the first line of what a compiler said, without the place and what varies."""
    for pattern, short in SHORT.items():
        if re.search(pattern, text):
            return short
    line = first_line(text) or "no reason given"
    return re.sub(r"^(loc\(.*?\)+: |unknown: |error: )+", "", line)[:80]


# What IREE says -> what it means, where its first line does not tell.
SHORT = {
    r"failed to link executable": "it calls a math function that the CPU back end does not have",
    r"inferred input/output operand": "shapes do not match",
    r"DISCARD_WRITE": "it writes into an input",
    r"region block must end with a linalg_ext.yield": "malformed top-k",
}

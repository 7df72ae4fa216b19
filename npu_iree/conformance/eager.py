"""Try one case op by op on the PyTorch device "npu", in-place variant included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from npu_iree.conformance.cases import LOOSER, Case, database
from npu_iree.conformance.judge import OUTCOMES, Verdict, _differences, _line, _samples, _tensors
from npu_iree.conformance.pool import Progress
from npu_iree.torch_device.registration import register_device

Function = Callable[..., Any]


def judge_eager(case: Case, target: str, progress: Progress) -> Verdict:
    """Try a case on "npu"; its outcome is the worst of its samples and variants.

    Args:
        case: the case.
        target: name of the target behind the device.
        progress: told what is about to be done, in case it never ends.
    """
    register_device(target)
    info = database()[case.position]
    variants = {"": info.op, "in place": info.inplace_variant}
    samples, problem = _samples(case)
    if not samples:
        return Verdict(case.key, "skipped", problem)
    worst, details = -1, ["nothing was tried"]
    for i, sample in enumerate(samples):
        for name, function in variants.items():
            if function is None:
                continue
            progress(f"sample {i} {name}")
            outcome, detail = _try(case, function, sample, case.backward and not name)
            if name and outcome == "skipped":  # eager cannot either: another dtype, a broadcast
                continue
            rank = OUTCOMES.index(outcome)
            if rank > worst:
                worst, details = rank, []
            if rank == worst and detail not in details:
                details.append(f"{name}: {detail}" if name and detail else detail)
    outcome = OUTCOMES[worst] if worst >= 0 else "skipped"
    return Verdict(case.key, outcome, "\n".join(filter(None, details))[:2000])


def _try(case: Case, function: Function, sample: Any, backward: bool) -> tuple[str, str]:
    try:
        expected = _run(function, sample, backward, "cpu")
    except Exception as error:  # whatever eager says: then there is nothing to compare with
        return "skipped", f"eager: {_line(error)}"
    counters.clear()
    try:
        actual = _run(function, sample, backward, "npu")
    except Exception as error:  # a case may fail in any way; the next one must not notice
        return "error", _line(error)
    if problems := _differences(actual, expected, LOOSER.get(case.name, 1)):
        return "wrong", next(iter(problems.values()))
    on_host = [name.removeprefix("host ") for name in counters["npu_iree"] if "host " in name]
    return ("host", ", ".join(on_host)) if on_host else ("device", "")


def _run(function: Function, sample: Any, backward: bool, device: str) -> list[Any]:
    """Give the tensors of the result, and of the gradients of the inputs, on the CPU."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone(memory_format=torch.preserve_format).to(device)
        return copy.requires_grad_(tensor.requires_grad and backward)

    torch.manual_seed(1)
    fresh = pytree.tree_map_only(torch.Tensor, copied, (sample.input, sample.args, sample.kwargs))
    value, args, kwargs = fresh
    with torch.set_grad_enabled(backward):
        results = _tensors(function(value, *args, **kwargs))
    roots = [r for r in results if backward and r.requires_grad]
    if roots:
        generator = torch.Generator().manual_seed(2)
        weights = [torch.randn(r.shape, generator=generator).to(r.dtype) for r in roots]
        torch.autograd.backward(
            roots, [w.to(r.device) for w, r in zip(weights, roots, strict=True)]
        )
    gradients = [t.grad for t in _tensors(fresh) if t.requires_grad and t.is_leaf]
    given = _tensors(fresh) if not backward else []  # an op in place has changed them
    found = [*(r.detach() for r in results), *given, *gradients]
    return [t if t is None else t.cpu() for t in found]

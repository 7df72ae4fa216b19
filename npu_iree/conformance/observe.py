"""Call a function and give all that can be compared: results, arguments after it, gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree


class Tried(Protocol):
    """An entry of `op_db`, or a program."""

    @property
    def name(self) -> str:
        """What it is known by."""

    @property
    def key(self) -> str:
        """What a journal knows it by."""

    @property
    def backward(self) -> bool:
        """Whether its gradients are compared, too."""


Calls = Sequence[tuple[Any, Sequence[Any], dict[str, Any]]]  # value, args, kwargs of each


def over(operator: Callable[..., Any]) -> Callable[[Calls], list[Any]]:
    """Return a function that calls an operator for each of several calls."""

    def function(calls: Calls) -> list[Any]:
        return [operator(value, *args, **kwargs) for value, args, kwargs in calls]

    return function


def observed(
    case: Tried,
    function: Callable[[Calls], list[Any]],
    samples: Sequence[Any],
    *,
    backward: bool | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Call a function on copies of sample inputs, with the same random numbers each time.

    Args:
        case: whose samples they are.
        function: what `over` returned, or the same compiled.
        samples: objects with `input`, `args` and `kwargs`, as PyTorch's `SampleInput`.
        backward: whether to compute gradients; by default as the case says.
        device: where the copies are, and where an op makes what it makes from nothing.

    Returns:
        Tensors on the CPU, and what else a result may be, by what they are: results, arguments as
        the call has left them, and the gradients of the inputs, None where an input has none.
    """
    backward = case.backward if backward is None else backward

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone(memory_format=torch.preserve_format).to(device)
        return copy.requires_grad_(tensor.requires_grad and backward)

    torch.manual_seed(1)
    others: list[Any] = [(s.args, s.kwargs) for s in samples]
    if case.name not in INDICES_ON_CPU:
        others = pytree.tree_map_only(torch.Tensor, copied, others)
    inputs = pytree.tree_map_only(torch.Tensor, copied, [s.input for s in samples])
    calls: Calls = [
        (value, args, {**kwargs, "device": device} if "device" in kwargs else kwargs)
        for value, (args, kwargs) in zip(inputs, others, strict=True)
    ]
    with torch.set_grad_enabled(backward):
        outputs = function(calls)
    if compared := COMPARED_BY.get(case.name):
        pairs = zip(calls, outputs, strict=True)
        outputs = [compared(*call, output) for call, output in pairs]
    if backward:
        _run_backward([r for r in _tensors_of(outputs) if r.requires_grad])
    given = _tensors_of(calls)
    found: dict[str, Any] = {
        **{f"result {i}": _plain(r) for i, r in enumerate(pytree.tree_leaves(outputs))},
        **{f"argument {i} after the call": _plain(t) for i, t in enumerate(given)},
    }
    leaves = [t for t in given if t.requires_grad and t.is_leaf]
    return found | {f"gradient {i}": _plain(t.grad) for i, t in enumerate(leaves)}


def _plain(value: Any) -> Any:
    """Return a tensor on the CPU, also of a number; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    return torch.tensor(value) if isinstance(value, (bool, int, float, complex)) else value


def _run_backward(roots: Sequence[torch.Tensor]) -> None:
    """Run backward from all roots, each with random weights of its own."""
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(r.shape, generator=generator).to(r.dtype) for r in roots]
    if roots:
        torch.autograd.backward(
            roots, [w.to(r.device) for w, r in zip(weights, roots, strict=True)]
        )


def _pointed_at(
    place: int, x: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any], output: Any
) -> Any:
    """Replace indices, alone or after values, by what they point at, and tell if one is twice.

    Which of equal elements the indices point at is open, unless the order is to be stable. `place`
    is that of the dimension among the arguments.
    """
    if kwargs.get("stable"):
        return output
    dim = kwargs.get("dim", args[place] if len(args) > place else -1)
    *values, indices = (output,) if isinstance(output, torch.Tensor) else output
    indices = indices.cpu()  # comparing is no work of the device that is tried
    ordered = indices.sort(dim).values
    twice = ordered.dim() > 0 and bool((ordered.diff(dim=dim) == 0).any())
    return *values, x.detach().cpu().gather(dim, indices), twice


def _product(_x: Any, _args: Any, _kwargs: Any, output: Any) -> Any:
    """Multiply singular vectors out: each pair is open to a common factor of modulus one."""
    u, s, v = output
    return s, (u * s.unsqueeze(-2)) @ v.mH


# Entries whose indices PyTorch wants on the CPU, whatever the device.
INDICES_ON_CPU = frozenset({"tensor_split"})
# Entries of which PyTorch's documentation leaves a part open -> what of them is compared.
COMPARED_BY: dict[str, Callable[..., Any]] = {
    "argsort": functools.partial(_pointed_at, 0),
    "sort": functools.partial(_pointed_at, 0),
    "topk": functools.partial(_pointed_at, 1),
    "svd_lowrank": _product,
    "pca_lowrank": _product,
}


def _tensors_of(tree: Any) -> list[torch.Tensor]:
    """List the tensors of a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

"""Modules that move to "npu" and back: their parameters stay the objects that they were.

PyTorch gives a parameter other memory in place only between devices on a list of its own; on others
a module gets new parameters. Here the old ones become what those are: tied ones stay tied,
optimizers know them, and their classes, attributes and hooks stay. What else holds a parameter, as
results do for their backward pass, keeps what it was; such a pass is refused where it would give a
gradient to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from npu_iree.torch_device.current import is_on_npu

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def keep_parameters(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Let a module's `_apply` keep the parameter objects where it moves them."""

    @functools.wraps(apply)
    def applied(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
        had = {name: (p, is_on_npu(p)) for name, p in self._parameters.items() if p is not None}

        def moved(tensor: torch.Tensor) -> Any:
            result = fn(tensor)
            if isinstance(tensor, torch.nn.Parameter) and is_on_npu(tensor) != is_on_npu(result):
                _leave_graph(tensor)
            return result

        try:
            return apply(self, moved, recurse)
        finally:
            for name, (parameter, was_on_npu) in had.items():
                new = self._parameters.get(name)
                if new is not None and new is not parameter and is_on_npu(new) != was_on_npu:
                    _take_over(parameter, new)
                    self._parameters[name] = parameter

    return applied


def _leave_graph(parameter: torch.nn.Parameter) -> None:
    """Let a gradient that was made with create_graph=True be a leaf, as what moves has to be."""
    if (gradient := parameter.grad) is not None and not gradient.is_leaf:
        parameter.grad = gradient.detach()


def _take_over(parameter: torch.nn.Parameter, new: Any) -> None:
    """Let a parameter, and its gradient, be what others are, which become what it was."""
    gradient, moved = parameter.grad, new.grad
    torch._C._swap_tensor_impl(parameter, new)
    if gradient is not None and moved is not None:
        torch._C._swap_tensor_impl(gradient, moved)
    for name in _HOOKS:  # they are those of the object, but what calls them has changed
        if (hooks := getattr(parameter, name)) is not None:
            setattr(parameter, name, hooks)
    if new.requires_grad and new._use_count() > 1:  # a graph has its node
        get_gradient_edge(new).node.register_prehook(_refuse)


def _refuse(_: object) -> None:
    raise RuntimeError(
        "this backward pass would give a gradient to a parameter whose module has moved since: "
        "run the backward pass before the module moves, or compute the result again"
    )

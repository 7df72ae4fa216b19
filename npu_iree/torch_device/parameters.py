"""Modules that move to "npu" and back: their parameters stay the objects that they were.

PyTorch gives a parameter other memory in place only between devices on a list of its own; on others
a module gets new parameters. Here the old ones become what those are: tied ones stay tied,
optimizers know them, and their classes, attributes and hooks stay.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.nn.utils.weight_norm import WeightNorm

from npu_iree.torch_device.current import is_on_npu

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def keep_parameters(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Let a module's `_apply` keep the parameter objects where it moves them."""

    @functools.wraps(apply)
    def applied(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
        had = {name: (p, is_on_npu(p)) for name, p in self._parameters.items() if p is not None}
        move = fn if isinstance(fn, _Move) else _Move(fn, self, recurse)
        try:
            return apply(self, move, recurse)
        finally:
            for name, (parameter, was_on_npu) in had.items():
                new = self._parameters.get(name)
                if new is not None and new is not parameter and is_on_npu(new) != was_on_npu:
                    _take_over(parameter, new)
                    self._parameters[name] = parameter

    return applied


class _Move:
    """What is applied to the tensors of a module, which moves as a whole or not at all."""

    def __init__(self, fn: Callable[..., Any], module: torch.nn.Module, recurse: bool) -> None:
        self._fn, self._module, self._recurse = fn, module, recurse
        self._is_allowed = False

    def __call__(self, tensor: torch.Tensor) -> Any:
        """Apply it; the first tensor that moves says that the others will.

        Raises:
            RuntimeError: a backward pass needs some of them where they are.
        """
        result = self._fn(tensor)
        if not self._is_allowed and is_on_npu(tensor) != is_on_npu(result):
            self._check(tensor.device, result.device)
            self._is_allowed = True
        return result

    def _check(self, source: torch.device, target: torch.device) -> None:
        _let_go_of_weights(self._module)
        if self._held(source):
            gc.collect()  # results in reference cycles
        if held := self._held(source):
            more = f" and {len(held) - 1} others" if len(held) > 1 else ""
            raise RuntimeError(
                f"the module cannot move to {target} now, and has not: something else holds its "
                f"parameter {held[0]!r}{more}, most likely a result whose backward pass needs it. "
                "Drop that result (`del out`) or run its backward pass first, or compute it under "
                "torch.no_grad()"
            )

    def _held(self, source: torch.device) -> list[str]:
        parameters = self._module.named_parameters(recurse=self._recurse)
        return [name for name, p in parameters if p.device == source and _is_held(p)]


def _let_go_of_weights(module: torch.nn.Module) -> None:
    """Detach what the old `weight_norm` has computed of parameters: each call does so anew."""
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                setattr(part, hook.name, getattr(part, hook.name).detach())


def _is_held(parameter: torch.nn.Parameter) -> bool:
    """Say whether a backward pass is to come that needs a parameter, or its gradient, as it is.

    The node alone that takes a parameter's gradient is also left of a pass that is over.
    """
    gradient = parameter.grad
    if gradient is not None and not gradient.is_leaf:
        return True
    if is_lazy(parameter) or not parameter.requires_grad or _uses(parameter) < 2:
        return False
    node = get_gradient_edge(parameter).node  # is the second, or is made now
    return node is None or _uses(parameter) > 2


def _take_over(parameter: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """Let a parameter, and its gradient, be what others are, which become what it was."""
    gradient, moved = parameter.grad, new.grad
    torch._C._swap_tensor_impl(parameter, new)
    if gradient is not None and moved is not None:
        torch._C._swap_tensor_impl(gradient, moved)
    for name in _HOOKS:  # they are those of the object, but what calls them has changed
        if (hooks := getattr(parameter, name)) is not None:
            setattr(parameter, name, hooks)
    if new.requires_grad and _uses(new) > 1:
        get_gradient_edge(new).node.register_prehook(_refuse)


def _refuse(_: object) -> None:
    raise RuntimeError(
        "this backward pass would give a gradient to a parameter whose module has moved since: "
        "run the backward pass before the module moves, or compute the result again"
    )


def _uses(tensor: Any) -> int:
    return int(tensor._use_count())

"""Errors that a user's hooks and functions raise within a backward pass."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest
import torch

from tolerances import assert_same

NPU = "npu"


def refuse(*_: object) -> NoReturn:
    raise ValueError("of the user's")


def with_saved(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, refuse):
        return x.sin()


def with_module(x: torch.Tensor) -> torch.Tensor:
    module = torch.nn.Tanh()
    module.register_full_backward_hook(refuse)
    return module(x)


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        refuse()


def hooked(add: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        add(y)
        return y

    return function


REFUSING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of a tensor": hooked(lambda y: y.register_hook(refuse)),
    "of a node": hooked(lambda y: y.grad_fn.register_hook(refuse)),
    "before a node": hooked(lambda y: y.grad_fn.register_prehook(refuse)),
    "of what is saved": with_saved,
    "of a module": with_module,
    "of a function": Refuses.apply,
}


def test_an_error_of_a_hook_ends_the_backward_pass_and_no_process() -> None:
    x = torch.ones(3, device=NPU, requires_grad=True)

    def run(name: str) -> torch.Tensor:
        with pytest.raises(ValueError, match="of the user's") as found:
            REFUSING[name](x).sum().backward()
        assert found.traceback[-1].name == "refuse", name
        assert found.value.__context__ is None, name
        return torch.autograd.grad(x.sin().sum(), x)[0]  # the next pass is right

    expected = torch.ones(3).cos()
    with ThreadPoolExecutor(2) as pool:
        for gradient in (*map(run, REFUSING), *pool.map(run, [*REFUSING] * 2)):
            assert_same(gradient.cpu(), expected)
    assert x.grad is None


def test_an_error_of_a_hook_within_a_hook_is_the_users() -> None:
    x = torch.ones(3, device=NPU, requires_grad=True)

    @torch.enable_grad()
    def again(_: torch.Tensor) -> None:
        with pytest.raises(ValueError, match="of the user's"):
            REFUSING["of a tensor"](x).sum().backward()
        raise KeyError("after it")

    x.register_post_accumulate_grad_hook(again)
    with pytest.raises(KeyError, match="after it"):
        (x * 2).sum().backward()


def test_an_error_that_is_caught_keeps_no_graph() -> None:
    x = torch.ones(3, device=NPU, requires_grad=True)
    loss = REFUSING["of a tensor"](x).sum()
    kept = weakref.ref(loss)
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            loss.backward()
        del loss
        assert kept() is None
    finally:
        gc.enable()

"""Small calls run on the calling thread, if what they wait for is there; nobody else does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import npu_iree
from lowering.effort import Effort
from lowering.region import Region
from npu_iree.errors import DeviceError
from npu_iree.executable import INLINE_EFFORT
from npu_iree.runner import Runner
from npu_iree.timeline import Timepoint, observed

Compile = Callable[..., Runner]
SMALL = torch.randn(4, 4)
LARGE = torch.randn(1024, 1024)


def product(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ x) + 1


class Submissions:
    """Notes of each piece of work whether it had ended when its submission returned."""

    def __init__(self) -> None:
        self.had_ended: list[bool] = []

    def __call__(self, point: Timepoint) -> None:
        self.had_ended.append(point.is_reached())


def test_a_small_call_has_ended_when_its_submission_returns(compile_function: Compile) -> None:
    runner, submissions = compile_function(product, SMALL), Submissions()
    with observed(submissions):
        (result,) = runner(SMALL)
    assert submissions.had_ended == [True]
    torch.testing.assert_close(result, product(SMALL))


def test_a_large_call_goes_to_the_queue(compile_function: Compile) -> None:
    runner, submissions = compile_function(product, LARGE), Submissions()
    with observed(submissions):
        runner(LARGE)
    assert submissions.had_ended == [False]


def test_device_memory_of_its_own_means_a_queue(compile_function: Compile) -> None:
    runner = compile_function(product, SMALL, target="npu-virtual")
    device = npu_iree.open_device("npu-virtual")
    assert device.inline is None
    (result,) = runner(SMALL)
    torch.testing.assert_close(result, product(SMALL))


def test_a_small_call_does_not_wait_for_what_it_reads(compile_function: Compile) -> None:
    """Behind a gate it is queued; what comes of it is read by calls of both kinds."""
    function = compile_function(product, SMALL).executables["region0"].functions["main"]
    device = npu_iree.open_device("npu-local")
    with device.hold() as gate:
        held = device.put(SMALL)
        (first,) = function(held, is_small=True)
        (second,) = function(first, is_small=True)
        assert not first.is_ready()
        assert not second.is_ready()
        gate.open()
        second.wait()
    (third,) = function(second, is_small=True)
    assert third.ready.is_reached()
    (fourth,) = function(third)
    want = product(product(product(product(SMALL))))
    torch.testing.assert_close(fourth.to_host(), want)


def test_a_small_call_on_what_has_failed_tells_why(compile_function: Compile) -> None:
    function = compile_function(product, SMALL).executables["region0"].functions["main"]
    device = npu_iree.open_device("npu-local")
    gate = device.gate("the past")
    lost = device.put(SMALL, after=gate.point)
    gate.fail("the power went")
    with pytest.raises(DeviceError, match="the power went"):
        function(lost, is_small=True)


def test_a_failure_on_the_calling_thread_is_left_to_who_waits() -> None:
    gate = npu_iree.open_device("npu-local").gate("work")
    gate.fail("out of luck")
    assert not gate.point.look()
    with pytest.raises(DeviceError, match="out of luck"):
        gate.point.wait()


@pytest.mark.parametrize(
    ("function", "size", "is_small"),
    [
        (lambda x: x + 1, (1,), True),
        (product, (4, 4), True),
        (lambda x: torch.topk(x, 2), (8,), True),
        (product, (64, 64), False),
        (lambda x: x[:, None] - x[None], (100,), False),  # what comes between counts, too
    ],
)
def test_effort(
    compile_function: Compile,
    function: Callable[[torch.Tensor], torch.Tensor],
    size: tuple[int, ...],
    is_small: bool,
) -> None:
    runner = compile_function(function, torch.ones(size))
    effort = Effort.of(runner.plan.regions["region0"])
    assert (effort.bound({}) <= INLINE_EFFORT) is is_small


def test_effort_of_sizes_that_change() -> None:
    effort = Effort(steps=2, elements=("s0*s1", "3"))
    assert not effort.is_static
    assert effort.bound({"s0": 4, "s1": 5}) == 2 * 20**2


def test_a_loop_may_take_for_ever() -> None:
    def count(x: torch.Tensor) -> tuple[torch.Tensor]:
        return torch.while_loop(lambda i: i < 3, lambda i: (i + 1,), (x,))

    program = torch.export.export(_Module(count), (torch.zeros(()),))
    region = cast(Region, SimpleNamespace(graph_module=program.graph_module))
    assert Effort.of(region).bound({}) > INLINE_EFFORT


class _Module(torch.nn.Module):
    """A function as torch.export takes it."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.forward = function

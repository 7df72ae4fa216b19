"""Small calls run on the calling thread, if what they wait for is there; nobody else does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import npu_iree
from lowering.effort import Effort
from lowering.region import Region
from npu_iree.device import Device
from npu_iree.errors import DeviceError, TargetError
from npu_iree.executable import Executable
from npu_iree.function import INLINE_EFFORT, Function
from npu_iree.runner import Runner
from npu_iree.targets import NPU_VIRTUAL
from npu_iree.timeline import Timepoint, observed

Compile = Callable[..., Runner]
SMALL, LARGE = torch.randn(4, 4), torch.randn(64, 64)


def product(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ x) + 1


@pytest.fixture
def device() -> Device:
    return npu_iree.open_device("npu-local")


@pytest.fixture
def function(compile_function: Compile) -> Function:
    """The product of small matrices, by itself."""
    return compile_function(product, SMALL).executables["region0"].functions["main"]


class Failing:
    """A context of IREE's in which every call fails."""

    def invoke(self, *_: object) -> None:
        raise RuntimeError("out of luck")


class Submissions(list[bool]):
    """Notes of each piece of work whether it had ended when its submission returned."""

    def add(self, point: Timepoint) -> None:
        self.append(point.reached)


def test_a_small_call_has_ended_when_its_submission_returns(compile_function: Compile) -> None:
    runner, had_ended = compile_function(product, SMALL), Submissions()
    with observed(had_ended.add):
        (result,) = runner(SMALL)
    assert had_ended == [True]
    torch.testing.assert_close(result, product(SMALL))


@pytest.mark.parametrize(("x", "target"), [(LARGE, "npu-local"), (SMALL, "npu-virtual")])
def test_others_go_to_the_queue(compile_function: Compile, x: torch.Tensor, target: str) -> None:
    """A large call, and any where the device has memory of its own."""
    runner, had_ended = compile_function(product, x, target=target), Submissions()
    with observed(had_ended.add):
        (result,) = runner(x)
    assert not any(had_ended)
    torch.testing.assert_close(result, product(x))


def test_a_small_call_does_not_wait_for_what_it_reads(function: Function, device: Device) -> None:
    """Behind a gate it is queued; what comes of it is read by calls of both kinds."""
    with device.hold() as gate:
        held = device.put(SMALL)
        (first,) = function(held, is_small=True)
        (second,) = function(first, is_small=True)
        assert not first.is_ready()
        assert not second.is_ready()
        gate.open()
        second.wait()
    (third,) = function(second, is_small=True)
    assert third.ready.reached
    (fourth,) = function(third)
    want = product(product(product(product(SMALL))))
    torch.testing.assert_close(fourth.to_host(), want)


def test_history_does_not_pile_up(function: Function, device: Device) -> None:
    """Who looks whether its arguments are there lets go of what came before them."""
    with device.hold() as gate:
        (first,) = function(device.put(SMALL))
        (second,) = function(first)
        gate.open()
        second.wait()
    past = weakref.ref(first)
    (third,) = function(second, is_small=True)
    del first
    gc.collect()
    assert past() is None
    assert not second.ready._after
    assert third.ready.reached


def test_a_look_lets_go_of_the_past(device: Device) -> None:
    gate = device.gate()
    point = Timepoint(gate.point.fence, gate.point.work, (gate.point,))
    assert not point.look()
    assert point._after
    gate.open()
    assert point.look()
    assert not point._after


def test_threads_share_one_small_call(compile_function: Compile) -> None:
    runner = compile_function(product, SMALL)
    inputs = [torch.randn(4, 4) for _ in range(64)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: [runner(x)[0] for _ in range(20)], inputs))
    for x, found in zip(inputs, results, strict=True):
        for result in found:
            torch.testing.assert_close(result, product(x))


def _refuse(*_: object) -> None:
    raise AssertionError("a call is submitted that could have run here")


def test_a_call_again_is_run_here(
    compile_function: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where inputs lie where they lay, with results in memory of their own each time."""
    runner, x = compile_function(product, SMALL), SMALL.clone()
    for _ in range(3):
        runner(x)
    monkeypatch.setattr(Function, "submit", _refuse)
    (first,) = runner(x)
    torch.testing.assert_close(first, product(x))
    x += 1
    (second,) = runner(x)
    torch.testing.assert_close(second, product(x))
    torch.testing.assert_close(first, product(x - 1))
    with pytest.raises(AssertionError, match="could have run here"):
        runner(torch.randn(4, 4))


@pytest.fixture
def policy() -> torch.nn.Module:
    layers = torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
    return torch.nn.Sequential(*layers).requires_grad_(False)


def test_a_small_model_runs_here(policy: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are bound on the calling thread, too; so they are when one has changed."""
    compiled, x = torch.compile(policy, backend="npu_iree"), torch.randn(16, 10)
    had_ended = Submissions()
    with observed(had_ended.add):
        compiled(x)
    assert had_ended == [True]
    for weight in policy.parameters():
        weight.mul_(2)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), policy(x))
    monkeypatch.setattr(Function, "submit", _refuse)
    torch.testing.assert_close(compiled(x), policy(x))


def test_a_small_model_waits_for_who_holds_the_device(
    policy: torch.nn.Module, device: Device
) -> None:
    """And does not keep the thread from which it is let go."""
    compiled, x = torch.compile(policy, backend="npu_iree"), torch.randn(16, 10)
    for changed in (False, True):
        compiled(x)
        if changed:
            policy[0].weight.mul_(2)
        with device.hold() as gate, ThreadPoolExecutor(1) as pool:
            call = pool.submit(compiled, x)
            with pytest.raises(TimeoutError):
                call.result(0.2)
            gate.open()
            torch.testing.assert_close(call.result(), policy(x))


def test_threads_share_one_small_model(policy: torch.nn.Module) -> None:
    compiled = torch.compile(policy, backend="npu_iree")
    inputs = [torch.randn(16, 10) for _ in range(16)]
    wanted = [policy(x) for x in inputs]
    compiled(inputs[0])
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: [compiled(x) for _ in range(20)], inputs))
    for want, found in zip(wanted, results, strict=True):
        for result in found:
            torch.testing.assert_close(result, want)


def test_a_call_again_gives_memory_of_its_own(compile_function: Compile) -> None:
    """The compiler hands out the argument's, where the result is equal to it."""
    runner, x = compile_function(lambda x: x * 1, SMALL), SMALL.clone()
    for _ in range(4):
        (result,) = runner(x)
        result += 1
        torch.testing.assert_close(x, SMALL)


def test_a_call_again_is_submitted_if_somebody_looks_on(compile_function: Compile) -> None:
    runner, had_ended = compile_function(product, SMALL), Submissions()
    for _ in range(3):
        runner(SMALL)
    with observed(had_ended.add):
        runner(SMALL)
    assert had_ended == [True]


def test_a_call_again_waits_for_who_holds_the_device(
    compile_function: Compile, device: Device
) -> None:
    runner = compile_function(product, SMALL)
    for _ in range(3):
        runner(SMALL)
    with device.hold() as gate, ThreadPoolExecutor(1) as pool:
        call = pool.submit(runner, SMALL)
        with pytest.raises(TimeoutError):
            call.result(0.2)
        gate.open()
        torch.testing.assert_close(call.result()[0], product(SMALL))


def test_a_call_again_that_fails_names_its_ops(compile_function: Compile) -> None:
    runner = compile_function(product, SMALL)
    for _ in range(3):
        runner(SMALL)
    executable = runner.executables["region0"]
    lane = executable._inline
    assert lane is not None
    executable._inline = replace(lane, context=Failing())
    with pytest.raises(DeviceError, match="out of luck") as caught:
        runner(SMALL)
    assert any("mm" in op for op in caught.value.ops)
    executable._inline = lane
    torch.testing.assert_close(runner(SMALL)[0], product(SMALL))


def test_a_small_call_writes_in_place(compile_function: Compile) -> None:
    counter = torch.zeros(1)
    compiled = torch.compile(lambda x: x.add_(1), backend="npu_iree")
    for i in range(3):
        compiled(counter)
        assert counter.item() == i + 1


def test_a_small_call_on_what_has_failed_tells_why(function: Function, device: Device) -> None:
    gate = device.gate("the past")
    lost = device.put(SMALL, after=gate.point)
    gate.fail("the power went")
    with pytest.raises(DeviceError, match="the power went"):
        function(lost, is_small=True)


def test_a_small_call_that_fails_names_its_ops(function: Function, device: Device) -> None:
    """There is no later wait at which to tell it."""
    executable: Executable = function._executable
    (result,) = function(device.put(SMALL), is_small=True)
    assert executable._inline is not None
    executable._inline = replace(executable._inline, context=Failing())
    with pytest.raises(DeviceError, match="out of luck") as caught:
        function(result, is_small=True)
    assert any("mm" in op for op in caught.value.ops)
    (again,) = function(result)
    torch.testing.assert_close(again.to_host(), product(product(SMALL)))


def test_a_look_leaves_a_failure_to_who_waits(device: Device) -> None:
    gate = device.gate("work")
    gate.fail("out of luck")
    assert not gate.point.look()
    with pytest.raises(DeviceError, match="out of luck"):
        gate.point.wait()


def test_what_ended_at_once_has_no_duration(compile_function: Compile) -> None:
    runner = compile_function(product, SMALL)
    with npu_iree.record_timeline() as timeline:
        runner(SMALL)
    (span,) = timeline.spans
    assert span.submitted_s == span.started_s == span.ended_s


def test_memory_of_its_own_has_no_calling_thread() -> None:
    odd = replace(NPU_VIRTUAL, inline_driver="local-sync")
    with pytest.raises(TargetError, match="local-sync"):
        Device(odd)


def test_a_target_has_no_device_of_another_with_its_name(device: Device) -> None:
    assert npu_iree.open_device(device.target) is device
    with pytest.raises(TargetError, match="another target"):
        npu_iree.open_device(replace(device.target, max_in_flight=1))


@pytest.mark.parametrize(
    ("function", "size", "is_small"),
    [
        (lambda x: x + 1, (1,), True),
        (product, (4, 4), True),
        (product, (32, 32), True),  # numbers of a row and a column, not every one with every other
        (torch.sum, (8192,), True),
        (lambda x: torch.topk(x, 2), (8,), True),
        (product, (64, 64), False),
        (lambda x: x[:, None] - x[None], (100,), False),  # what comes between counts, too
    ],
)
def test_effort(function: Callable[..., object], size: tuple[int, ...], is_small: bool) -> None:
    assert (effort_of(function, torch.ones(size)).bound({}) <= INLINE_EFFORT) is is_small


@torch.library.custom_op("inline_tests::solve", mutates_args=())
def solve(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@solve.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def count(x: torch.Tensor) -> tuple[torch.Tensor]:
    return torch.while_loop(lambda i: i < 3, lambda i: (i + 1,), (x,))


@pytest.mark.parametrize("function", [count, solve])
def test_a_loop_and_a_kernel_of_the_users_may_take_for_ever(function: Callable[..., Any]) -> None:
    assert effort_of(function, torch.zeros(())).bound({}) > INLINE_EFFORT


def test_effort_of_sizes_that_change() -> None:
    effort = Effort(steps={"s0*s1": 2, "3": 1})
    assert effort.bound({"s0": 400, "s1": 5}) == 2 * 2000 + 1024


def effort_of(function: Callable[..., object], *args: torch.Tensor) -> Effort:
    program = torch.export.export(_Module(function), args)
    return Effort.of(cast(Region, SimpleNamespace(graph_module=program.graph_module)))


class _Module(torch.nn.Module):
    """A function as torch.export takes it."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x)

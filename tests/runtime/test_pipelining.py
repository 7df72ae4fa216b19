"""Device work is submitted ahead, overlaps, and crosses to the host only where it must."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import npu_iree
from calls import Call
from npu_iree.array import DeviceArray
from npu_iree.device import Device
from npu_iree.runner import Runner
from npu_iree.targets import NPU_LOCAL
from npu_iree.timeline import Gate, Timepoint
from npu_iree.transfers import Ledger

pytestmark = pytest.mark.usefixtures("shared_cache")

Compile = Callable[..., Runner]


def two_regions_then_host(x: torch.Tensor, z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a = torch.relu(x @ w)  # region 0
    b = a * torch.median(z)  # the median is a host op on an input, so this is region 1
    return torch.median(b) + b  # a host op between regions


def crossings(ledger: Ledger, kind: str) -> list[int]:
    return [e.nbytes for e in ledger.transfers if e.kind == kind]


@pytest.fixture
def inputs(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.randn(4, 8), torch.randn(5), weight


def test_ledger_shows_what_the_host_op_reads_and_writes_once_each(
    compile_function: Compile, inputs: tuple[torch.Tensor, ...]
) -> None:
    runner = compile_function(two_regions_then_host, *inputs, target="npu-virtual")
    assert len(runner.plan.regions) == 3
    device = npu_iree.open_device("npu-virtual")
    before = dataclasses.replace(device.memory.count)
    with npu_iree.record_transfers() as ledger:
        (result,) = runner(*inputs)
    torch.testing.assert_close(result, two_regions_then_host(*inputs))
    count = device.memory.count
    x, _, w = (t.nbytes for t in inputs)
    # in: x and w, then what the two medians wrote; out: what the second one read, and the result
    assert sorted(crossings(ledger, "h2d")) == sorted([x, w, 4, 4])
    assert crossings(ledger, "d2h") == [x, x]
    assert ledger.nbytes("h2d") == count.h2d_bytes - before.h2d_bytes
    assert ledger.nbytes("d2h") == count.d2h_bytes - before.d2h_bytes
    assert len(ledger.copies("h2d")) == count.h2d - before.h2d
    assert len(ledger.copies("d2h")) == count.d2h - before.d2h
    assert len(ledger.waits) == 2


def test_nothing_crosses_between_two_device_regions(
    compile_function: Compile, inputs: tuple[torch.Tensor, ...], target: str
) -> None:
    runner = compile_function(two_regions_then_host, *inputs, target=target)
    handed_on = {v for r in runner.plan.regions.values() for v in (n.name for n in r.outputs)}
    read_on_host = {n.name for s in runner.plan.host_segments.values() for n in s.inputs}
    with npu_iree.record_transfers() as ledger:
        runner(*inputs)
    moved = {e.value for e in ledger.transfers}
    returned = {o.name for o in runner.plan.outputs}  # type: ignore[attr-defined]
    assert handed_on - read_on_host - returned
    assert not moved & (handed_on - read_on_host - returned)


def test_device_work_up_to_the_host_op_is_submitted_before_the_call_waits(
    compile_function: Compile, inputs: tuple[torch.Tensor, ...]
) -> None:
    runner = compile_function(two_regions_then_host, *inputs, target="npu-virtual")
    device = npu_iree.open_device("npu-virtual")
    with device.hold() as gate:
        call = Call(runner, *inputs)
        assert call.is_waiting.wait(timeout=30)
        assert [p.work.name for p in device.in_flight] == ["region0", "region1"]
        assert not any(p.is_reached() for p in device.in_flight)
        assert call.is_running()
        gate.open()
        (result,) = call.result()
    torch.testing.assert_close(result, two_regions_then_host(*inputs))


def two_into_zeros(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    zeros = torch.zeros(4, 8)
    return zeros.index_add(0, i, x[:1]), zeros.index_add(0, i, x[2:3])


X, INDEX = torch.randn(4, 8), torch.tensor([1])


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x: x.sum(1)[:, None] - x.sum(1)[None], (X,)),
        (lambda x: torch.stack([x[:, 0].relu(), x[:, 1].tanh(), x.sum(1)], 1), (X,)),
        (lambda x, i: x.index_copy(1, i, x[:, :1] * 2), (X, INDEX)),
        (two_into_zeros, (X, INDEX)),
        (lambda x: torch.topk(x.softmax(1), 2), (X,)),
    ],
    ids=["read along two axes", "columns", "a row written", "rows added", "sorted"],
)
def test_a_region_is_submitted_whole(
    compile_function: Compile, function: Callable[..., object], args: tuple[torch.Tensor, ...]
) -> None:
    runner = compile_function(function, *args)
    assert len(runner.plan.regions) == 1
    with npu_iree.open_device("npu-local").hold() as gate:
        call = Call(runner, *args)
        assert call.is_waiting.wait(timeout=30), "the submission itself waits for the device"
        gate.open()
        results = call.result()
    expected = function(*args)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    torch.testing.assert_close(results, expected)


def two_independent_regions(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.median(torch.relu(x) + 1), torch.median(torch.tanh(y) * 2)


@pytest.mark.parametrize("held", [0, 1])
def test_independent_regions_run_at_the_same_time(
    compile_function: Compile, target: str, held: int
) -> None:
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    runner = compile_function(two_independent_regions, x, y, target=target)
    assert len(runner.plan.regions) == 2
    device = npu_iree.open_device(target)
    gate = device.gate()
    args: list[object] = [x, y]
    args[held] = device.put((x, y)[held], after=gate.point)
    call = Call(runner, *args)
    assert call.is_waiting.wait(timeout=30)
    points = {p.work.name: p for p in device.in_flight}
    standing = points[f"region{held}"]
    if other := points.get(f"region{1 - held}"):  # it may have ended already
        other.wait(timeout_s=30)
    assert not standing.is_reached()
    gate.open()
    for result, expected in zip(call.result(), two_independent_regions(x, y), strict=True):
        torch.testing.assert_close(result, expected)


def test_four_ops_cost_two_transfers_and_one_wait(
    compile_function: Compile, weight: torch.Tensor, target: str
) -> None:
    """`op1(cpu) -> op2(npu) -> op3(npu) -> op4(cpu)`, the question that started this."""

    def four_ops(x: torch.Tensor) -> torch.Tensor:
        first = torch.cumsum(x, 0)
        return torch.median(torch.relu(first) * 2.0)

    x = torch.randn(4, 8)
    runner = compile_function(
        four_ops, x, target=target, disabled_ops=["aten.cumsum", "aten.median"]
    )
    with npu_iree.record_transfers() as ledger:
        (result,) = runner(x)
    torch.testing.assert_close(result, four_ops(x))
    assert [(e.kind, e.nbytes) for e in ledger.transfers] == [("h2d", x.nbytes), ("d2h", x.nbytes)]
    assert len(ledger.waits) == 1


def test_a_failure_names_the_region_its_ops_and_the_users_line(target: str) -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1  # the line that is named

    x = torch.randn(4, 8)
    compiled = torch.compile(shifted, backend="npu_iree", options={"target": target})
    compiled(x)
    device = npu_iree.open_device(target)
    with device.hold() as gate:
        call = Call(compiled, x)
        assert call.is_waiting.wait(timeout=30)
        gate.fail("the device was lost")
        with pytest.raises(npu_iree.DeviceError) as caught:
            call.result()
    assert caught.value.region == "region0"
    assert "the device was lost" in caught.value.cause
    (relu, *_) = caught.value.ops
    assert "aten.relu.default" in relu
    assert f"{__file__}:" in relu
    assert "in shifted" in relu
    torch.testing.assert_close(compiled(x), shifted(x))  # the device goes on


def test_work_in_flight_is_bounded() -> None:
    target = dataclasses.replace(NPU_LOCAL, max_in_flight=2)
    device = Device(target)
    gate = device.gate()

    def submit_three() -> None:
        for _ in range(3):
            device.track(gate.point, 4)

    call = Call(submit_three)
    assert call.is_waiting.wait(timeout=30)
    assert call.is_running()
    assert [e.reason for e in call.ledger.waits] == ["queue is full"]
    gate.open()
    call.result()


def test_copy_budget_raises_before_the_copy(target: str) -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    x = torch.randn(4, 8)
    compiled = torch.compile(shifted, backend="npu_iree", options={"target": target})
    expected = compiled(x)
    count = npu_iree.open_device(target).memory.count
    before = count.d2h
    with npu_iree.copy_budget(h2d=1, d2h=0):
        if target == "npu-virtual":
            with pytest.raises(npu_iree.HostCopyError) as caught:
                compiled(x)
            assert caught.value.transfer.nbytes == x.nbytes  # type: ignore[attr-defined]
        else:  # memory is unified: the result is handed over, not copied
            torch.testing.assert_close(compiled(x), expected)
    assert count.d2h == before
    with npu_iree.copy_budget(waits=0), pytest.raises(npu_iree.HostCopyError, match="waits"):
        compiled(x)
    torch.testing.assert_close(compiled(x), expected)


def test_a_call_that_fails_waits_for_all_that_it_has_submitted(compile_function: Compile) -> None:
    """They may read the caller's tensors in place, which are his again once the call has failed."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.median(torch.relu(x)) + 1, torch.relu(y)  # the host waits for the first

    device = npu_iree.open_device("npu-virtual")
    runner = compile_function(function, torch.ones(3), torch.ones(5), target="npu-virtual")
    fails, is_late = device.gate(), device.gate()
    x, y = (device.put(torch.ones(n), after=g.point) for n, g in ((3, fails), (5, is_late)))
    threading.Timer(0.5, is_late.open).start()
    fails.fail("lost")
    with pytest.raises(npu_iree.DeviceError, match="lost"):
        runner(x, y)
    assert y.ready.is_reached()


def test_a_call_that_ends_at_its_submission_is_waited_for(
    compile_function: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C, say, while it waits for its place in the queue: nobody has a handle."""
    runner, x = compile_function(torch.relu, torch.ones(3)), torch.ones(3)
    for _ in range(3):
        runner(x)  # then the device has a view of it already
    device, seen = npu_iree.open_device("npu-local"), list[Timepoint]()

    def interrupted(point: Timepoint, nbytes: int) -> None:
        seen.append(point)
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "track", interrupted)
    with device.hold() as gate, ThreadPoolExecutor(1) as pool:
        call = pool.submit(runner, x)
        with pytest.raises(TimeoutError):
            call.result(0.2)
        gate.open()
        assert isinstance(call.exception(), KeyboardInterrupt)
        assert seen[0].is_reached()


def policy_of_a_wait_for(array: DeviceArray, gate: Gate) -> tuple[int, int]:
    """Wait in a thread, open the gate meanwhile; give the thread's policy while it waits, after."""
    after: list[int] = []

    def wait() -> None:
        array.wait()
        after.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=wait)
    thread.start()
    assert thread.native_id is not None
    time.sleep(0.3)
    meanwhile = os.sched_getscheduler(thread.native_id)
    gate.open()
    thread.join()
    return meanwhile, after[0]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
def test_who_waits_for_the_last_work_does_not_take_its_cpu_away() -> None:
    """Else IREE's wait spins until its time slice is over, on a CPU that a worker is pinned to."""
    device = npu_iree.open_device("npu-virtual")
    gate = device.gate()
    first = device.put(torch.ones(3), after=gate.point)
    assert policy_of_a_wait_for(first, gate) == (os.SCHED_BATCH, os.SCHED_OTHER)
    gate = device.gate()
    first, last = (device.put(torch.ones(3), after=gate.point) for _ in range(2))
    meanwhile, _ = policy_of_a_wait_for(first, gate)
    assert meanwhile == os.SCHED_OTHER, "more work is behind it, and no CPU becomes free"
    last.wait()


def test_what_ran_on_the_calling_thread_is_not_the_last_work(compile_function: Compile) -> None:
    """It leaves the queue as it was: who waits for the last of that is as polite as before."""
    runner, gate = compile_function(torch.relu, torch.ones(3)), npu_iree.open_device().gate()
    last = npu_iree.open_device("npu-virtual").put(torch.ones(3), after=gate.point)
    runner(torch.ones(3))
    assert policy_of_a_wait_for(last, gate) == (os.SCHED_BATCH, os.SCHED_OTHER)

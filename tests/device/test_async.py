"""Waiting in asyncio: other tasks go on, failures arrive where they are awaited."""

from __future__ import annotations

import asyncio

import pytest
import torch

import npu_iree
from npu_iree.device import Device
from npu_iree.timeline import Timepoint

NPU = "npu"


def test_other_tasks_go_on_while_one_awaits_the_device(device: Device) -> None:
    a = torch.ones(3, device=NPU)

    async def main() -> list[str]:
        order = []

        async def wait() -> None:
            await npu_iree.ready({"b": [b], "other": 3})
            order.append("ready")

        task = asyncio.create_task(wait())
        for i in range(3):
            await asyncio.sleep(0)
            order.append(f"other {i}")
        gate.open()
        await task
        return order

    with device.hold() as gate:
        b = a + 1
        assert asyncio.run(main()) == ["other 0", "other 1", "other 2", "ready"]
    assert b.tolist() == [2, 2, 2]


def test_the_event_loop_never_stands_still_with_a_hundred_requests_in_flight(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    inputs = [torch.randn(2, 8) for _ in range(100)]
    expected = [model(x).detach() for x in inputs]
    compiled = torch.compile(model.to(NPU), backend="npu_iree")
    with torch.no_grad():
        compiled(inputs[0].to(NPU))
    torch.npu.synchronize()
    wait_ns, blocked = Timepoint._wait_ns, []

    def watch(point: Timepoint, timeout_ns: int | None) -> bool:
        if timeout_ns != 0 and not wait_ns(point, 0):
            blocked.append(point)
        return wait_ns(point, timeout_ns)

    monkeypatch.setattr(Timepoint, "_wait_ns", watch)

    async def request(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = compiled(x.to(NPU))
        return (await npu_iree.ready(y)).cpu()

    async def main() -> list[torch.Tensor]:
        with device.hold() as gate:
            tasks = [asyncio.create_task(request(x)) for x in inputs]
            await asyncio.sleep(0)  # all of them have run up to where they wait
            assert len(device.in_flight) == len(inputs)
            assert not any(task.done() for task in tasks)
            gate.open()
        return await asyncio.gather(*tasks)

    for one, other in zip(asyncio.run(main()), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert blocked == []


def test_a_failure_arrives_where_it_is_awaited(device: Device) -> None:
    a = torch.ones(3, device=NPU)
    with device.hold() as gate:
        b = a + 1  # the line that is named
        gate.fail("the device was lost")
    with pytest.raises(npu_iree.DeviceError, match="the device was lost") as caught:
        asyncio.run(npu_iree.ready(b))
    assert f"{__file__}:" in caught.value.ops[0]
    assert (a + 1).tolist() == [2, 2, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # IREE's bridge
def test_a_failure_arrives_where_it_was_awaited_before_and_others_go_on(device: Device) -> None:
    a = torch.ones(3, device=NPU)

    async def main() -> None:
        last = device.gate()
        other = asyncio.create_task(npu_iree.ready(device.put(torch.ones(3), after=last.point)))
        with device.hold() as gate:
            task = asyncio.create_task(npu_iree.ready(a + 1))
            await asyncio.sleep(0.02)
            assert not task.done()
            gate.fail("the device was lost")
            with pytest.raises(npu_iree.DeviceError, match="the device was lost"):
                await asyncio.wait_for(task, timeout=20)
        assert not other.done()
        last.open()
        await asyncio.wait_for(other, timeout=20)

    asyncio.run(main())


def test_a_failure_is_told_before_what_is_slow_has_ended(device: Device) -> None:
    slow, fails = device.gate(), device.gate()
    arrays = [device.put(torch.ones(3), after=gate.point) for gate in (slow, fails)]
    fails.fail("lost")
    with pytest.raises(npu_iree.DeviceError, match="lost"):
        asyncio.run(asyncio.wait_for(npu_iree.ready(arrays), timeout=20))
    slow.open()


def test_wait_any_returns_the_first_that_is_done(device: Device) -> None:
    a = torch.ones(3, device=NPU)
    with device.hold() as gate:
        slow = a + 1
        with pytest.raises(npu_iree.DeviceTimeoutError):
            npu_iree.wait_any([slow, slow], timeout_s=0.01)
        assert npu_iree.wait_any([slow, a]) == 1
        gate.open()
    assert npu_iree.wait_any([slow]) == 0
    with pytest.raises(npu_iree.ArgumentError, match="one tree at least"):
        npu_iree.wait_any([])

"""Streams and events order work on the device, and nothing else waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import npu_iree
from npu_iree.device import Device
from npu_iree.timeline import Gate
from npu_iree.torch_device.storage import handle_of

NPU = "npu"


@pytest.fixture
def gate(device: Device) -> Iterator[Gate]:
    gate = device.gate()
    yield gate
    gate.open()


def event_at(gate: Gate) -> torch.npu.Event:  # type: ignore[name-defined]
    event = torch.npu.Event()
    event._points = (gate.point,)
    return event


def is_ready(tensor: torch.Tensor) -> bool:
    return handle_of(tensor).is_ready()


ORDERS: dict[str, Callable[[torch.npu.Stream, Gate], None]] = {  # type: ignore[name-defined]
    "stream.wait_event": lambda stream, gate: stream.wait_event(event_at(gate)),
    "event.wait": lambda stream, gate: event_at(gate).wait(stream),
}


@pytest.mark.parametrize("order", ORDERS)
def test_work_of_a_stream_starts_after_the_event(order: str, gate: Gate) -> None:
    a = torch.ones(3, device=NPU)
    stream = torch.npu.Stream()
    ORDERS[order](stream, gate)
    with npu_iree.copy_budget(waits=0), torch.npu.stream(stream):
        held = a + 1
        put = torch.ones(3).to(NPU)
        compiled = torch.compile(torch.sin, backend="npu_iree")(a)
    free = a + 2
    assert free.tolist() == [3, 3, 3]
    assert not any(map(is_ready, (held, put + held, compiled)))
    gate.open()
    assert held.tolist() == [2, 2, 2]
    assert compiled.tolist() == pytest.approx(torch.ones(3).sin().tolist())


def test_a_stream_waits_for_another_one(gate: Gate) -> None:
    a = torch.ones(3, device=NPU)
    first, second = torch.npu.Stream(), torch.npu.Stream()
    first.wait_event(event_at(gate))
    with torch.npu.stream(first):
        held = a + 1
    second.wait_stream(first)
    with torch.npu.stream(second):
        later = a * 2
    event = second.record_event()
    assert not is_ready(later)
    assert not event.query()
    gate.open()
    event.synchronize()
    assert is_ready(held)
    assert is_ready(later)


def test_what_an_event_orders_outlives_a_failure_before_it(gate: Gate) -> None:
    a = torch.ones(3, device=NPU)
    stream = torch.npu.Stream()
    stream.wait_event(event_at(gate))
    gate.fail("the other work was lost")
    with torch.npu.stream(stream):
        assert (a + 1).tolist() == [2, 2, 2]


def test_a_stream_is_current_in_one_thread(gate: Gate) -> None:
    a = torch.ones(3, device=NPU)
    stream = torch.npu.Stream()
    stream.wait_event(event_at(gate))
    with torch.npu.stream(stream), ThreadPoolExecutor(1) as pool:
        assert torch.npu.current_stream() is stream
        assert pool.submit(lambda: (a + 1).tolist()).result() == [2, 2, 2]
    assert torch.npu.current_stream() is torch.npu.default_stream()


def test_a_stream_is_current_in_its_block_and_free_afterwards(device: Device) -> None:
    one, other = torch.npu.Stream(), torch.npu.Stream()
    one.wait_stream(other)
    with one, other:
        assert torch.npu.current_stream() is other
    assert torch.npu.current_stream() is torch.npu.default_stream()
    torch.npu.synchronize()
    assert device.is_free, "calls may run in this thread again"


def test_no_stream_leaves_the_current_one_and_what_is_none_is_refused() -> None:
    for set_stream in (torch.npu.set_stream, torch.accelerator.set_stream):
        set_stream(None)
        with pytest.raises(TypeError, match=r"takes a torch\.npu\.Stream, not <class 'int'>"):
            set_stream(3)
    assert (torch.ones(3, device=NPU) + 1).tolist() == [2, 2, 2]


def test_events_that_would_measure_time_are_refused() -> None:
    with pytest.raises(npu_iree.NpuIreeError, match="record_timeline"):
        torch.npu.Event(enable_timing=True)


def test_streams_and_events_say_what_they_are() -> None:
    assert repr(torch.npu.default_stream()) == "<torch.npu.Stream on npu:0: default stream>"
    assert repr(torch.npu.Stream()).startswith("<torch.npu.Stream on npu:0: stream 0x")
    assert repr(torch.npu.Event()) == "<torch.npu.Event of 0 calls>"


def test_streams_are_those_of_the_one_device_and_may_be_recorded() -> None:
    torch.ones(3, device=NPU).record_stream(torch.npu.Stream("npu:0"))
    for ask in (torch.npu.Stream, torch.npu.current_stream, torch.npu.default_stream):
        with pytest.raises(RuntimeError, match="there is one device, npu:0; npu:1 is no such"):
            ask(device="npu:1")


def test_a_copy_to_the_host_comes_after_the_event(gate: Gate) -> None:
    a = torch.ones(3, device=NPU)
    stream = torch.npu.Stream()
    stream.wait_event(event_at(gate))

    def copy() -> list[float]:
        with torch.npu.stream(stream):
            values: list[float] = a.tolist()
            return values

    with ThreadPoolExecutor(1) as pool:
        copied = pool.submit(copy)
        with pytest.raises(TimeoutError):
            copied.result(timeout=0.05)
        gate.open()
        assert copied.result() == [1, 1, 1]

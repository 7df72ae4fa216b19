"""Threads share kernels: each is traced and compiled once, whoever comes first."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
import torch

import npu_iree
from npu_iree.array import DeviceArray
from npu_iree.torch_device import storage
from tolerances import assert_same

NPU = "npu"
OPS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.atan,
    torch.asinh,
    lambda t: t * t + 3,
    lambda t: torch.softmax(t, 0),
    lambda t: t.sum(0) - 1,
    lambda t: t.amax(0),
]


def test_rows_that_several_threads_write_to_are_all_written() -> None:
    x = torch.zeros(6, 1024, device=NPU)

    def add(row: int) -> None:
        for _ in range(20):
            x[row] += 1

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(add, range(6)))
    assert x[:, 0].tolist() == [20] * 6


def test_a_reader_of_memory_that_nobody_set_does_not_undo_a_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, allocate = torch.empty(4, device=NPU), storage.allocate
    writer = Thread(target=lambda: x.copy_(torch.ones(4)))

    def allocate_slowly(nbytes: int) -> DeviceArray:
        writer.start()
        writer.join(timeout=0.1)
        return allocate(nbytes)

    monkeypatch.setattr(storage, "allocate", allocate_slowly)
    storage.handle_of(x)
    writer.join()
    assert x.tolist() == [1] * 4


@pytest.mark.parametrize("columns", [2, 200], ids=["on their threads", "queued"])
def test_ops_called_first_by_several_threads_are_right(
    counts: Counter[str], caplog: pytest.LogCaptureFixture, columns: int
) -> None:
    x = torch.randn(5, 3, 2, columns)
    a = x.to(NPU)
    with (
        caplog.at_level(logging.WARNING, logger="npu_iree"),
        ThreadPoolExecutor(6) as pool,
    ):
        calls = [op for op in OPS for _ in range(3)]
        results = list(pool.map(lambda op: op(a), calls))
    for op, result in zip(calls, results, strict=True):
        assert_same(result.cpu(), op(x))
    assert counts["compiles"] <= 8  # each op once
    assert "runs on the host" not in caplog.text


def test_a_block_that_forbids_the_host_is_of_its_thread() -> None:
    a = torch.ones(3, device=NPU)
    with torch.npu.fallback("error"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: a.median().item()).result() == 1
        with pytest.raises(npu_iree.UnsupportedOpError):
            a.median()
        torch.npu.set_fallback("host")  # until the block ends
        assert a.median().item() == 1

"""`register_device()` comes late, or where another device is: it works, or says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

PROGRAMS = Path(__file__).parents[1] / "programs"
NPU = "npu"


def run(kernel_cache: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NPU_IREE_CACHE": str(kernel_cache)}
    return subprocess.run(
        [sys.executable, *args], env=environment, capture_output=True, text=True, timeout=300
    )


def test_a_device_registered_after_a_backward_pass_trains(kernel_cache: Path) -> None:
    done = run(kernel_cache, str(PROGRAMS / "late_device.py"))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for losses in told["losses"]:
        assert losses == pytest.approx(told["expected"], rel=1e-5)


TAKEN = """
import torch, npu_iree
torch.utils.rename_privateuse1_backend("other")
for _ in range(2):
    try:
        npu_iree.register_device()
    except npu_iree.NpuIreeError as error:
        print(error)
assert not hasattr(torch, "npu")
try:
    npu_iree.register_device("npu")
except npu_iree.TargetError as error:
    assert "is the device's name; register_device takes a target's" in str(error)
"""


def test_another_device_from_outside_is_a_clear_error(kernel_cache: Path) -> None:
    done = run(kernel_cache, "-c", TAKEN)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("room for one device from outside, and 'other' is there already" in x for x in lines)


def test_storages_are_made_on_the_device() -> None:
    empty = torch.UntypedStorage(12, device=NPU)
    assert (empty.device.type, empty.nbytes()) == ("npu", 12)
    view = torch.empty(0, device=NPU).set_(empty)
    view.fill_(3)
    assert view.tolist() == [3, 3, 3]
    empty.resize_(16)
    assert (empty.nbytes(), view.tolist()) == (16, [3, 3, 3])
    with pytest.raises(RuntimeError, match="only grows: 16 bytes cannot become 0"):
        empty.resize_(0)
    assert torch.UntypedStorage([1, 2, 3], device="npu:0").cpu().tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match="cannot be swapped in place"):
        empty.byteswap(torch.float32)
    assert torch.UntypedStorage(5).nbytes() == 5
    assert torch.UntypedStorage(5, device="cpu").device.type == "cpu"


def laid_out(place: str) -> list[tuple[int, ...]]:
    """Trace images whose channels come last, and return the strides of results and gradients."""
    last = torch.channels_last
    with FakeTensorMode(), torch.device(place):
        x = torch.empty(2, 8, 6, 6).to(memory_format=last).requires_grad_()
        weight = torch.empty(8, 4, 3, 3).to(memory_format=last).requires_grad_()
        results = [
            F.conv2d(x, weight, groups=2),
            F.conv_transpose2d(x, weight, stride=2),
            F.pixel_shuffle(x, 2),
        ]
        gradients = torch.autograd.grad([r.square().sum() for r in results], [x, weight])
        assert {t.device for t in (*results, *gradients)} == {x.device}
        return [t.stride() for t in (*results, *gradients)]


def test_what_is_traced_lies_in_memory_as_on_the_cpu() -> None:
    assert laid_out(NPU) == laid_out("cpu")

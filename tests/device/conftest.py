"""What the tests of the PyTorch device "npu" share: the device, and one cache for its kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_iree
from npu_iree.device import Device
from once import folder_of_run, made_once
from programs.launch import run


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the kernels of all tests."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def _npu(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NPU_IREE_CACHE", str(kernel_cache))
    npu_iree.register_device()
    yield
    torch.npu.set_fallback("host")
    torch.npu.set_memory_limit(None)


@pytest.fixture(scope="session")
def told_of_npu_virtual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `programs/npu_virtual.py` tells of a process whose "npu" has memory of its own."""
    cache = folder_of_run(tmp_path_factory) / "cache"

    def make(folder: Path) -> None:
        told = run("npu_virtual", NPU_IREE_CACHE=str(cache))
        (folder / "told.json").write_text(json.dumps(told))

    told = made_once(tmp_path_factory, "npu-virtual", make) / "told.json"
    return dict(json.loads(told.read_text()))


@pytest.fixture
def device() -> Device:
    """The device behind "npu"."""
    return npu_iree.open_device("npu-local")

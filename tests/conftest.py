"""Fixtures of all tests: a fresh Dynamo for each, counters, targets."""

from __future__ import annotations

import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "passive"  # several processes share the CPUs: none spins
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import register_random
from torch._dynamo.utils import counters

os.environ["NPU_IREE_CACHE"] = "off"  # but for tests that ask for a cache, or for `shared_cache`
# The processes that tests start keep the bytecode of this checkout, as a user's do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from once import folder_of_run, made_once
from runtime_env import make_runtime_only_python

COMPILING = frozenset({"device", "ir", "models", "offline", "runtime"})  # folders whose tests do
MOST_CASES = 2  # of a test; of one with more, the first is run, and one in eight of the others
ONE_IN = 8


@pytest.hookimpl(tryfirst=True)  # before what is marked is left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave most cases of a test that has many to `pytest -m sweep`; run all of one that is named.

    Which, depends on their names alone, so that all processes of a run choose the same.
    """
    if config.args and all("::" in name for name in config.args):
        addopts = config.getini("addopts")
        if config.option.markexpr == addopts[addopts.index("-m") + 1]:
            config.option.markexpr = ""
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.path.parent.name in COMPILING and item.get_closest_marker("sweep") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for alike in cases.values():
        for case in alike[1:] if len(alike) > MOST_CASES else ():
            if zlib.crc32(case.nodeid.encode()) % ONE_IN:
                case.add_marker("sweep")


class TorchRandom:
    """PyTorch's random numbers for Hypothesis, which repeats an example with those it had."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # Hypothesis holds it weakly
register_random(TORCH_RANDOM)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def shared_cache(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compile nothing that a test of this run has compiled, unless the test counts compiles."""
    if "cold_counts" not in request.fixturenames:
        folder = folder_of_run(tmp_path_factory)
        monkeypatch.setenv("NPU_IREE_CACHE", str(folder / "cache"))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))


@pytest.fixture
def counts() -> Counter[str]:
    """The counters of npu_iree, from zero."""
    counters["npu_iree"].clear()
    return counters["npu_iree"]


@pytest.fixture
def cold_counts(counts: Counter[str]) -> Counter[str]:
    """The counters, where what is compiled counts: `shared_cache` leaves such a test alone."""
    return counts


@pytest.fixture
def own_pool() -> Iterator[None]:
    """End the server that forks a pool's workers: the next one has another environment."""
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def runtime_only_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python interpreter with the project, torch and IREE's runtime, and no compiler.

    Start it with `runtime_env.runtime_only_environment()`.
    """
    folder = made_once(tmp_path_factory, "runtime-only", make_runtime_only_python)
    return folder / "bin" / "python"


@pytest.fixture(params=["npu-local", "npu-virtual"])
def target(request: pytest.FixtureRequest) -> str:
    """Each built-in target that runs here."""
    return str(request.param)

"""What the tests of artifacts share: models compiled once a session."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from command import end, start
from models.exported import MODELS, save
from models.small import Net, SmallModel, cached, compiled, signatures
from npu_iree.offline.build import BuildOptions
from once import made_once


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bert.vmfb, resnet.vmfb and llama.vmfb, by the command line from .pt2 files.

    The parameters of the ResNet are in a .safetensors file, the others' in a .irpa file.
    """
    return made_once(tmp_path_factory, "zoo", _compile_zoo)


def _compile_zoo(folder: Path) -> None:
    types = ("--import", "transformers.modeling_outputs")
    processes = []
    for name in MODELS:
        sources, artifact = save(name, folder), folder / f"{name}.vmfb"
        params = "safetensors" if name == "resnet" else "split"
        options = ("-o", artifact, "--params", params, "--verify", "--json", *types)
        options += ("--least-size", "1") if name == "llama" else ()
        processes.append(start("compile", *sources, *options))
    for process in processes:
        done = end(process)
        assert done.code == 0, (done.out, done.err)
        assert done.json()["difference"] < 1e-4
        assert "stage linalg-to-flow took" in done.err
        assert "Warning" not in done.err


@pytest.fixture(scope="session")
def signatures_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of `signatures`, as entry points."""
    return _made(tmp_path_factory, "signatures", signatures())


@pytest.fixture(scope="session")
def cache_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of `cached`, as entry points."""
    return _made(tmp_path_factory, "cached", cached())


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of a `Net`, with a dynamic batch; its parameters are in `net.safetensors`."""
    batch = torch.export.Dim("batch", min=1, max=16)
    model = SmallModel(Net(), (torch.ones(2, 4),), dynamic={"x": {0: batch}})
    return _made(tmp_path_factory, "net", {"main": model}, BuildOptions(params="safetensors"))


def _made(
    factory: pytest.TempPathFactory, name: str, models: Mapping[str, SmallModel], *options: Any
) -> Path:
    file = f"{name}.vmfb"
    return made_once(factory, name, lambda f: compiled(models, f / file, *options)) / file

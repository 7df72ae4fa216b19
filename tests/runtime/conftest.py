"""What the runtime tests share: graphs compiled without Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from either import LOCAL_FIRST
from lowering.capture import capture_aot
from lowering.decompositions import decomposition_table
from npu_iree.aot_graph import compile_graph
from npu_iree.options import Options
from npu_iree.runner import Runner


@pytest.fixture(params=LOCAL_FIRST)
def any_target(request: pytest.FixtureRequest) -> str:
    """A target, where it does not matter whose memory it has."""
    return str(request.param)


@pytest.fixture
def compile_function() -> Callable[..., Runner]:
    """Compile a function of tensors for a target, as a runner that takes handles too."""

    def compile_(function: Callable[..., Any], *args: Any, **options: Any) -> Runner:
        graph = make_fx(function, decomposition_table=decomposition_table())(*args)
        return compile_graph(capture_aot(graph), Options.parse(options))

    return compile_


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compile anew, and return the folder that has what each stage made."""
    monkeypatch.setenv("NPU_IREE_DUMP", str(tmp_path))
    monkeypatch.setenv("NPU_IREE_CACHE", "off")
    return tmp_path


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(8, 8)

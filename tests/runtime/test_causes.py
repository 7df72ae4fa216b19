"""Each compile says why, by its guard: a line for TORCH_LOGS, artifacts for TORCH_TRACE."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_iree.cause import Cause
from npu_iree.errors import UnsupportedOpError
from programs.launch import start

X = torch.randn(4, 8)
# Which graphs there are is the same, and nothing is compiled for them.
ON_HOST = {"disabled_ops": ["relu", "tanh", "mul", "sum", "threshold_backward", "expand"]}


class Model(torch.nn.Module):
    """What may change: shapes, an argument, an attribute, a text."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 3

    def forward(self, x: torch.Tensor, k: float = 1.5, how: str = "relu") -> torch.Tensor:
        return getattr(torch, how)(x) * k * self.factor


@pytest.fixture
def causes(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Give the part, the cause and the guard of each compile since it was asked last."""
    caplog.set_level(logging.INFO, logger="npu_iree.report")

    def found() -> list[str]:
        lines = [r.getMessage() for r in caplog.records if r.name == "npu_iree.report"]
        caplog.clear()
        matches = [re.match(r"graph \d+ \((\w+)\) for npu-local: ([^;]*);", line) for line in lines]
        return [f"{m[1]}: {m[2]}" for m in matches if m]

    return found


@pytest.mark.slow
def test_each_recompile_names_the_guard_that_failed(causes: Callable[[], list[str]]) -> None:
    model = Model()
    compiled = torch.compile(model, backend="npu_iree", options=ON_HOST)
    compiled(X)
    assert causes() == ["inference: first call"]
    compiled(torch.randn(6, 8))
    (cause,) = causes()
    assert cause.startswith("inference: new shape: tensor 'x' size mismatch at index 0. expected 4")
    compiled(torch.randn(6, 8, 2))
    (cause,) = causes()
    assert cause.startswith("inference: new shape: tensor 'x' rank mismatch")
    compiled(X, k=2.5)
    assert causes() == ["inference: new constant: k == 1.5"]
    compiled(X, k=2.5, how="tanh")
    assert causes() == ["inference: new constant: how == 'relu'"]
    compiled(X.half(), k=2.5, how="tanh")
    assert causes() == ["inference: guard: tensor 'x' dtype mismatch. expected Float, actual Half"]
    with torch.no_grad():
        compiled(X.half(), k=2.5, how="tanh")
    assert causes() == ["inference: guard: GLOBAL_STATE changed: grad_mode"]
    compiled(X.half(), k=2.5, how="tanh")
    assert causes() == [], "what is there is not compiled again"


def test_an_attribute_of_a_module_is_a_constant(causes: Callable[[], list[str]]) -> None:
    model = Model()
    compiled = torch.compile(model, backend="npu_iree", options=ON_HOST)
    compiled(X)
    model.factor = 4
    compiled(X)
    assert causes() == ["inference: first call", "inference: new constant: self.factor == 3"]


@pytest.mark.slow
def test_a_backward_graph_has_the_cause_of_its_forward_graph(
    causes: Callable[[], list[str]],
) -> None:
    compiled = torch.compile(Model(), backend="npu_iree", options=ON_HOST)
    for rows in (4, 6):
        compiled(torch.randn(rows, 8, requires_grad=True)).sum().backward()
    first, second, third, fourth = causes()
    assert (first, second) == ("forward: first call", "backward: first call")
    for part, cause in (("forward", third), ("backward", fourth)):
        assert cause.startswith(f"{part}: new shape: tensor 'x' size mismatch")


def test_backward_graphs_that_are_compiled_later_have_their_own_cause(
    causes: Callable[[], list[str]],
) -> None:
    compiled = torch.compile(Model(), backend="npu_iree", options=ON_HOST)
    results = [compiled(X.clone().requires_grad_(), k=k).sum() for k in (1.5, 2.5)]
    for result in results:
        result.backward()
    expected = ["first call", "new constant: k == 1.5"]
    found = causes()
    assert [c for c in found if c.startswith("forward")] == [f"forward: {e}" for e in expected]
    assert [c for c in found if c.startswith("backward")] == [f"backward: {e}" for e in expected]


def test_each_graph_of_a_function_has_its_own_cause(causes: Callable[[], list[str]]) -> None:
    def broken(x: torch.Tensor, k: float) -> torch.Tensor:
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return y * k

    compiled = torch.compile(broken, backend="npu_iree", options=ON_HOST)
    compiled(X, 1.5)
    assert causes() == ["inference: first call"] * 2
    compiled(X, 2.5)
    assert causes() == ["inference: new constant: k == 1.5"], "the first half does not know k"
    compiled(torch.randn(6, 8), 2.5)
    first, second = causes()
    assert "tensor 'x' size mismatch" in first
    assert "tensor 'y' size mismatch" in second


def test_what_failed_to_compile_is_no_guard(causes: Callable[[], list[str]]) -> None:
    options: dict[str, Any] = {"fallback": "error"}

    def refused(x: torch.Tensor) -> torch.Tensor:
        return torch.median(x)

    for _ in range(2):
        with pytest.raises(Exception, match=r"aten\.median") as raised:
            torch.compile(refused, backend="npu_iree", options=options)(X)
        assert isinstance(raised.value.inner_exception, UnsupportedOpError)  # type: ignore[attr-defined]
    torch.compile(refused, backend="npu_iree")(X)
    (cause,) = causes()
    assert cause.startswith(("inference: first call", "inference: again"))


def test_a_graph_without_dynamo_has_a_cause_too() -> None:
    assert Cause.now() == Cause("direct")


PROGRAM = ("cases", "f32", "mixed")


def run_with(**env: str) -> str:
    """Run two cases, the second of which sends an op to the host; give the standard error."""
    fault = {"NPU_IREE_FAULT": "torch-to-linalg:memory:aten.tanh.default"}
    process = start(*PROGRAM, **fault, **env)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return err


@pytest.mark.sweep
def test_torch_logs_shows_one_line_a_compile(tmp_path: Path) -> None:
    for cache in ("0 hits, 1 misses", "1 hits, 0 misses"):
        err = run_with(TORCH_LOGS="npu_iree", NPU_IREE_CACHE=str(tmp_path))
        lines = [line for line in err.splitlines() if "npu_iree/report.py" in line]
        assert len(lines) == 2
        assert err.count("for npu-local") == 2, "each line once"
        assert re.search(
            rf"first call; 1 regions \({cache}\), \d compiles, 0 host ops, \d+ ms", lines[0]
        )
        assert "1 host ops" in lines[1]
    assert "lowering/" not in err


@pytest.mark.sweep
def test_torch_trace_has_the_plan_and_a_report(tmp_path: Path) -> None:
    run_with(TORCH_TRACE=str(tmp_path / "trace"), NPU_IREE_CACHE="off")
    (log,) = (tmp_path / "trace").iterdir()
    found: dict[str, list[str]] = {"npu_iree_plan": [], "npu_iree_compile": []}
    entries = re.findall(r"^(\S.*)\n((?:\t.*\n)*)", log.read_text(), re.MULTILINE)
    for head, payload in entries:
        if artifact := re.search(r'"artifact": \{"name": "(npu_iree_\w+)"', head):
            assert '"frame_id"' in head, "tlparse knows which compile it belongs to"
            found[artifact[1]].append(payload.replace("\t", ""))
    plans, reports = found["npu_iree_plan"], [json.loads(t) for t in found["npu_iree_compile"]]
    assert len(plans) == len(reports) == 2
    assert "invoke " in plans[0]
    assert "aten.tanh.default" in plans[1]
    assert [r["cause"]["kind"] for r in reports] == ["first call", "first call"]
    assert [r["host_ops"] for r in reports] == [0, 1]
    assert reports[1]["counts"]["healed_ops"] == 1

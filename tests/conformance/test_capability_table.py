"""The capability table that is checked in says what the code of today does."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from lowering.capabilities import NOT_LOWERED, Capabilities, load_capabilities
from measuring.table import Row, disagreement
from measuring.verdict import RIGHT

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "lowering" / "capabilities" / "npu-local.toml"


@pytest.fixture(scope="module")
def table() -> Capabilities:
    return load_capabilities("npu-local.toml")


@pytest.mark.slow
def test_some_ops_measured_anew_are_as_the_table_says() -> None:
    """On the target that has memory of its own; its code is npu-local's."""
    asked = ("--check", "4", "--limit", "120", "--target", "npu-virtual", "--table", str(TABLE))
    done = subprocess.run(
        [sys.executable, "ci/measure_capabilities.py", *asked],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 ops tried; 0 are not" in done.stdout


def test_it_was_measured_with_the_versions_that_are_installed() -> None:
    header = re.search(r"^# with (.*)\.$", TABLE.read_text(), re.MULTILINE)
    assert header
    for text in header[1].split(", "):
        name, measured = text.split()
        assert version(name).partition("+")[0] == measured.partition("+")[0], name


def test_every_op_of_it_exists(table: Capabilities) -> None:
    for name in {*table.ops, *table.host}:
        space, op, overload = name.split(".")
        assert hasattr(getattr(getattr(torch.ops, space), op), overload), name


def row(op: str, dtypes: list[str], reason: str) -> Row:
    return Row(op, f"{op} (f32:2)", dtypes, "plain", "a test", reason, "")


@pytest.mark.parametrize(
    ("tried", "problem"),
    [
        (row("aten.add.Tensor", ["f32"], RIGHT), ""),
        (row("aten.add.Tensor", ["f32"], "gives other numbers than eager"), "says that it runs"),
        (row("aten.median.dim", ["f32"], RIGHT), "it runs right"),
        (row("aten.median.dim", ["f32"], NOT_LOWERED), ""),
        (row("aten.no_such_op.default", ["f32"], RIGHT), "does not have it"),
    ],
)
def test_a_table_that_is_wrong_is_told(table: Capabilities, tried: Row, problem: str) -> None:
    found = disagreement(tried, table)
    assert problem in found
    assert bool(problem) == bool(found)


@pytest.mark.sweep
def test_ops_that_take_uint8_take_all_of_it(table: Capabilities) -> None:
    """Not only what is below 128, as all samples are that are measured: torch-mlir has a sign."""
    x = torch.tensor([[0, 1, 127, 128, 200, 255]], dtype=torch.uint8)
    others = [(), (0.7,), (2,), (x.flip(1), 0.5), (x.flip(1),), ([1, 6],), ([6],)]
    calls: list[Callable[[torch.Tensor], Any]] = []
    for name in sorted(op for op, dtypes in table.ops.items() if "u8" in dtypes):
        space, op, overload = name.split(".")
        if space != "aten" or "empty" in op:
            continue
        function = getattr(getattr(torch.ops.aten, op), overload)
        for rest in others:
            call = functools.partial(_leaves_of, function, rest)
            try:
                call(x)
            except (RuntimeError, TypeError, IndexError, NotImplementedError):
                continue
            calls.append(call)

    def all_of(x: torch.Tensor) -> list[Any]:
        return [call(x) for call in calls]

    assert len(calls) > 50
    found = torch.compile(all_of, backend="npu_iree")(x)
    for call, one, other in zip(calls, found, all_of(x), strict=True):
        told = f"{call.args[0]} {call.args[1]}"
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True, msg=told)


def _leaves_of(function: Callable[..., Any], rest: tuple[Any, ...], x: torch.Tensor) -> list[Any]:
    return pytree.tree_leaves(function(x, *rest))

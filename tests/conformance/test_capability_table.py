"""The capability table that is checked in says what the code of today does."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from lowering.capabilities import NOT_LOWERED, Capabilities, load_capabilities
from measuring.table import Row, disagreement
from measuring.verdict import RIGHT

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "lowering" / "capabilities" / "npu-local.toml"


@pytest.fixture(scope="module")
def table() -> Capabilities:
    return load_capabilities("npu-local.toml")


def test_some_ops_measured_anew_are_as_the_table_says() -> None:
    done = subprocess.run(
        [sys.executable, "ci/measure_capabilities.py", "--check", "4"],
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

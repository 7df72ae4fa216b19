"""`npu-iree capabilities`: the table is shown whole, and a loss is told."""

from __future__ import annotations

import json
from importlib import import_module, metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from npu_iree.cli import app
from npu_iree.targets import ENTRY_POINT_GROUP

PAGE = Path(__file__).parents[2] / "lowering" / "capabilities" / "npu-local.md"


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["capabilities", *args])


def table(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return str(path)


def test_show_says_where_an_op_runs_and_why_not() -> None:
    done = run(
        "show", "--filter", r"^aten\.(median\.dim|add\.Tensor|cumsum\.default)$", "--format", "json"
    )
    found = {row["op"]: row for row in json.loads(done.stdout)}
    assert "f32" in found["aten.add.Tensor"]["dtypes"]
    assert found["aten.median.dim"] == {
        "op": "aten.median.dim", "dtypes": [], "host": "torch-mlir cannot lower it",
        "limits": [],
    }  # fmt: skip
    assert "if scalar: where no tensor has a dimension" in found["aten.cumsum.default"]["host"]
    (limit,) = found["aten.cumsum.default"]["limits"]
    assert (limit["scalar"], limit["dynamic"], limit["longer_than"]) == (True, False, None)


def test_what_a_package_prints_is_not_among_the_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "package_that_prints.py").write_text("print('hello')\nTARGET = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry = metadata.EntryPoint("prints", "package_that_prints:TARGET", ENTRY_POINT_GROUP)
    module = import_module("npu_iree.targets")
    monkeypatch.setattr(module.metadata, "entry_points", lambda **_: [entry])
    module._installed.cache_clear()
    done = run("show", "--filter", "^aten.relu.default$", "--format", "json")
    module._installed.cache_clear()
    assert [row["op"] for row in json.loads(done.stdout)] == ["aten.relu.default"]
    assert "hello" in done.stderr


def test_the_page_that_is_checked_in_says_what_the_table_says() -> None:
    done = run("show", "npu-local", "--format", "markdown")
    assert done.stdout == PAGE.read_text(), (
        "write it anew: npu-iree capabilities show npu-local --format markdown"
    )


def test_diff_tells_what_is_lost_and_fails(tmp_path: Path) -> None:
    before = table(tmp_path, "before", '[ops]\n"aten.add.Tensor" = ["f32", "i64"]\n')
    after = table(tmp_path, "after", '[ops]\n"aten.add.Tensor" = ["f32", "f16"]\n')
    done = run("diff", before, after)
    assert done.exit_code == 1
    assert "1 ops differ; 1 run in fewer dtypes" in done.stdout
    words = done.stdout.split()
    assert words.index("i64") < words.index("f16"), "lost before gained"


def test_diff_of_a_gain_and_of_no_change_passes(tmp_path: Path) -> None:
    before = table(tmp_path, "before", '[host]\n"aten.foo.default" = "not tried"\n')
    after = table(tmp_path, "after", '[ops]\n"aten.foo.default" = ["f32"]\n')
    assert run("diff", before, after).exit_code == 0
    assert "the tables say the same" in run("diff", before, before).stdout


def test_a_filter_that_is_no_expression_is_a_usage_error() -> None:
    done = run("show", "--filter", "(")
    assert done.exit_code == 2
    assert "no regular expression" in done.output


ADD = '[ops]\n"aten.add.Tensor" = ["f32", "i64"]\n[[limits]]\nreason = "r"\n'


def test_diff_of_a_new_limit_fails_and_of_a_wider_one_passes(tmp_path: Path) -> None:
    long, longer = (table(tmp_path, f"l{n}", f"{ADD}longer_than = {n}\n") for n in (10, 20))
    never = table(tmp_path, "never", f'{ADD}dtypes = ["i64"]\n')
    empty = table(tmp_path, "empty", f"{ADD}empty = true\n")
    assert [run("diff", long, other).exit_code for other in (longer, never, empty)] == [0, 1, 1]
    assert run("diff", longer, long).exit_code == 1
    both, one = (
        table(tmp_path, name, f"{ADD}dtypes = {dtypes}\nlonger_than = 10\n")
        for name, dtypes in (("both", '["f32", "i64"]'), ("one", '["f32"]'))
    )
    assert [run("diff", *pair).exit_code for pair in ((both, one), (long, one), (one, both))] == [
        0,
        0,
        1,
    ]
    (row,) = json.loads(run("show", never, "--format", "json").stdout)
    assert row["dtypes"] == ["f32"]

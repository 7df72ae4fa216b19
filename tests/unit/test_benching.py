"""What benchmarks tell: other numbers as such, what died as missing, and no figures of others."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import bench
import measure_capabilities
from benching import suite
from benching.pair import _difference
from benching.turns import turns

NAN = float("nan")


@pytest.mark.parametrize(
    ("mine", "theirs", "difference"),
    [
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([1.0, NAN], [1.0, 2.0], NAN),
        ([1.0, 2.0], [1.0, NAN], NAN),
        ([1.0], [1.0, 1.0], NAN),
    ],
)
def test_nan_is_a_difference(mine: list[float], theirs: list[float], difference: float) -> None:
    others = [torch.ones(3)]
    found = _difference([torch.tensor(mine), *others], [torch.tensor(theirs), *others])
    assert found == difference or (math.isnan(found) and math.isnan(difference))


def test_a_small_tensor_is_compared_by_its_own_size() -> None:
    large, small = torch.tensor([1000.0]), torch.tensor([2.0])
    assert _difference([large, small * 2], [large, small]) == 1.0
    assert _difference([large, small * 1e-6], [large, small * 0]) < 1e-5


class _Child:
    def __init__(self, name: str) -> None:
        self.name, self.asked = name, Counter[str]()

    def ask(self, what: str, *_: object) -> dict[str, Any]:
        self.asked[what] += 1
        dies = self.name == "inductor" and self.asked[what] == 2
        return {"failed": "its process ended with -9"} if dies else {"ms": 2.0}


def test_a_backend_that_dies_in_a_round_is_missing() -> None:
    names = ("eager", "npu_iree", "inductor")
    rows = {name: suite.Row() for name in names}
    plan = suite.Plan(backends=names, rounds=3, seconds=1, mode="inference", sizes="static")
    children: Any = {name: _Child(name) for name in names}
    suite._rounds(children, rows, plan, Path())
    suite._settle(rows)
    assert rows["inductor"].missing == "its process ended with -9"
    assert (rows["inductor"].ms, rows["inductor"].rounds_ms) == (None, [])
    assert (rows["npu_iree"].of_eager, rows["npu_iree"].missing) == (1.0, "")


def test_figures_of_other_settings_are_refused() -> None:
    bench._refuse_other_settings("vit x1", {"seconds": 1}, {"seconds": 1})
    with pytest.raises(SystemExit, match="seconds 1, not 2"):
        bench._refuse_other_settings("vit x1", {"seconds": 1}, {"seconds": 2})


def test_turns_go_back_and_forth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benching.turns.REST_S", 0)
    assert list(turns("ab", 3)) == ["a", "b", "b", "a", "a", "b"]


def test_half_a_line_of_a_journal_is_left_out(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.write_text('{"op": "aten.ad')
    assert measure_capabilities._read(journal) == {}

"""What a capability table says of a call: by op, dtype and shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowering.capabilities import CapabilityError, load_capabilities

SORT = "aten.sort.default"


def test_long_rows_are_sorted_by_the_host() -> None:
    table = load_capabilities("npu-local.toml")
    assert table.why_not(SORT, [torch.empty(2, 1024)]) is None
    assert "quadratic" in str(table.why_not(SORT, [torch.empty(2, 1025)]))


@pytest.mark.parametrize(
    ("limit", "problem"),
    [('longer_than = "x"', "number of elements"), ("longest = 3", "unknown key")],
)
def test_a_limit_that_says_nothing_sensible_is_refused(
    tmp_path: Path, limit: str, problem: str
) -> None:
    path = tmp_path / "table.toml"
    path.write_text(f'[[limits]]\nops = ["{SORT}"]\n{limit}\nreason = "r"\n')
    with pytest.raises(CapabilityError, match=problem):
        load_capabilities(str(path))

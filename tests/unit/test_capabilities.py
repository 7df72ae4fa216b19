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
    [
        ('longer_than = "x"', "number of elements"),
        ("longer_than = true", "number of elements, not True"),
        ("longer_than = -1", "number of elements, not -1"),
        ('empty = "no"', "empty of a limit is true or false, not 'no'"),
        ("longest = 3", "unknown 'longest'. Did you mean 'longer_than'"),
        ('dtypes = ["float32"]', "unknown 'float32'.* There are: bf16, bool"),
    ],
)
def test_a_limit_that_says_nothing_sensible_is_refused(
    tmp_path: Path, limit: str, problem: str
) -> None:
    path = tmp_path / "table.toml"
    path.write_text(
        f'[ops]\n"{SORT}" = ["f32"]\n[[limits]]\nops = ["{SORT}"]\n{limit}\nreason = "r"\n'
    )
    with pytest.raises(CapabilityError, match=problem):
        load_capabilities(str(path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f'[op]\n"{SORT}" = ["f32"]', "section: unknown 'op'. Did you mean 'ops'"),
        (f'[ops]\n"{SORT}" = "f32"', "is a list of names, not 'f32'"),
        (f'[ops]\n"{SORT}" = ["float32"]', "unknown 'float32'.* There are: bf16, bool"),
        (f'[host]\n"{SORT}" = 3', "as text, not 3"),
        ('[ops]\n"relu" = ["f32"]', "'relu' names no op: it is 'namespace.op.overload'"),
        (f'[ops]\n"{SORT}" = ["f32"]\n[host]\n"{SORT}" = "r"', "is in .ops. and in .host."),
        ("ops = 3", "'ops' is no table"),
        ("limits = [3]", "cannot read the capability table"),
        (
            f'[ops]\n"{SORT}" = ["f32"]\n[[limits]]\nops = ["aten.sort"]\nreason = "r"',
            "ops of .*unknown 'aten.sort'",
        ),
    ],
)
def test_a_table_that_says_nothing_sensible_is_refused(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "table.toml"
    path.write_text(text)
    with pytest.raises(CapabilityError, match=problem):
        load_capabilities(str(path))


def test_an_op_that_pytorch_has_not_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "table.toml"
    path.write_text('[ops]\n"aten.sort.default" = ["f32"]\n"aten.relux.default" = ["f32"]\n')
    load_capabilities(str(path))
    assert caplog.messages == [
        f"{path}: PyTorch {torch.__version__} has no op 'aten.relux.default'."
        " Did you mean 'aten.relu'?"
    ]

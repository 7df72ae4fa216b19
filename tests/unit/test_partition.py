"""A graph is cut and scheduled in the order of its size, whatever its sizes are computed of."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lowering.capabilities import load_capabilities
from lowering.capture import capture_aot
from lowering.nodes import draws_random_numbers
from lowering.partition import Partition, partition
from lowering.plan import build_plan
from lowering.region import extract_region

README = Path(__file__).parents[2] / "README.md"


def cut(graph_module: torch.fx.GraphModule, table: str | Path = "npu-local.toml") -> Partition:
    return partition(capture_aot(graph_module), load_capabilities(str(table)))


@pytest.mark.timeout(60)  # a walk of each way to it would never end
def test_a_size_that_many_sizes_are_computed_of_is_looked_at_once() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        n, m = x.shape[0], y.shape[0]
        for _ in range(80):
            n, m = n + m, n
        return torch.lgamma(x * n) * x.exp() * m

    parts = cut(make_fx(function, tracing_mode="symbolic")(torch.randn(5), torch.randn(7)))
    plan = build_plan(parts, [extract_region(s, ()) for s in parts.regions])
    assert sorted(s.space for s in parts.segments) == ["device", "device", "device", "host"]
    assert len(plan.scalars) > 80


def test_assertions_need_no_order_among_random_numbers() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            torch._assert_async((x < 9).all(), "large")
            x = x.exp() + torch.rand(4)
        return x

    parts = cut(make_fx(function, tracing_mode="fake")(torch.randn(4)))
    drawn = [[n for n in s.nodes if draws_random_numbers(n)] for s in parts.segments]
    assert sorted(map(len, drawn))[-2:] == [0, 4], "all of them at once, before the device runs"


def test_the_table_of_the_readme_sorts_rows_that_fit_on_the_device(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^    \[ops\]\n(?:    .*\n|\n)*", README.read_text(), re.MULTILINE)

    def why_host(length: int, table: str) -> set[str]:
        path = tmp_path / f"{length} {len(table)}.toml"
        path.write_text(table)
        sort = make_fx(lambda x: torch.sort(x).values, tracing_mode="fake")
        parts = cut(sort(torch.randn(2, length)), path)
        return {op.reason for op in parts.host_ops.values()}

    table = textwrap.dedent(shown)
    assert why_host(1024, table) == set()
    assert why_host(1025, table) == {"rows over 1024 do not fit the scratchpad"}
    told = {"a result of it is i64, which the table does not list for it"}
    assert why_host(1024, table.replace(', "i64"', "")) == told

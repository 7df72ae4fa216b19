"""Intervals hold every value that the ops of a graph give, whatever is computed from what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from lowering.decompositions import decomposition_table
from lowering.intervals import Intervals

Tensor = torch.Tensor

STEPS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a - 2 * b,
    lambda a, b: a * b,
    lambda a, b: a * -3,
    lambda a, b: a.to(torch.float32) * 0.7,
    lambda a, b: a.to(torch.float16) / 3,
    lambda a, b: torch.where(a < b, a, b + 1),
    lambda a, b: torch.where(a < 0, a + 6, a),
    lambda a, b: torch.minimum(a, b),
    lambda a, b: torch.maximum(a, b),
    lambda a, b: a.clamp(-2, 3),
    lambda a, b: a.clamp(min=1),
    lambda a, b: a.clamp(max=-1),
    lambda a, b: a.to(torch.int64) % 4,
    lambda a, b: torch.div(a, 3, rounding_mode="floor"),
    lambda a, b: torch.div(a, 3, rounding_mode="trunc"),
    lambda a, b: a.to(torch.int64),
    lambda a, b: a.to(torch.int8),
    lambda a, b: a.to(torch.uint8),
    lambda a, b: a.to(torch.bool),
    lambda a, b: a.float().floor(),
    lambda a, b: (a.float() * 0.3).ceil(),
    lambda a, b: (a.float() * -0.3).trunc(),
    lambda a, b: -(a.to(torch.int32)),
    lambda a, b: a.to(torch.int64).abs(),
    lambda a, b: a.float().round().to(torch.int32),
    lambda a, b: a.argmax(0).expand(4, 4),
    lambda a, b: a.sort(dim=1).indices,
    lambda a, b: a.topk(2, dim=0).indices.repeat(2, 1),
    lambda a, b: a.max(1).indices.expand(4, 4),
    lambda a, b: torch.arange(7, -9, -4).expand(4, 4) + a,
    lambda a, b: torch.cat([a[:2], b[2:]]),
    lambda a, b: a.gather(1, torch.arange(4).expand(4, 4)).flip(0).t(),
    lambda a, b: torch.full_like(a, 5) - b,
    lambda a, b: torch.ops.aten.copy.default(torch.ones(4, 4), a),
    lambda a, b: (a < b) | (a < 1),
    lambda a, b: a.to(torch.float32).view(torch.int32),
]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9)), max_size=7)
)
def test_intervals_hold_what_is_computed(
    steps: list[tuple[Callable[[Tensor, Tensor], Tensor], int, int]],
) -> None:
    def function(x: Tensor) -> Tensor:
        values = [x, torch.arange(16).view(4, 4) - 5]
        for step, i, j in steps:
            values.append(step(values[i % len(values)], values[j % len(values)]))
        return values[-1]

    x = torch.randint(-9, 9, (4, 4), generator=torch.Generator().manual_seed(len(steps)))
    try:
        graph = make_fx(function, decomposition_table=decomposition_table())(x)
    except RuntimeError:  # bools are not subtracted
        reject()
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    known = Intervals(graph.graph, nodes)
    values = _values(graph, x)
    for node in nodes:
        found, value = known.of(node), values[node]
        if isinstance(value, Tensor) and found is not None:
            assert found[0] <= value.min() <= value.max() <= found[1], node.format_node()


def _values(graph: fx.GraphModule, x: Tensor) -> dict[fx.Node, object]:
    interpreter = fx.Interpreter(graph, garbage_collect_values=False)
    interpreter.run(x)
    return interpreter.env


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.arange(5), (0, 4)),
        (lambda x: x.argmax(1), (0, 3)),
        (lambda x: x.long().clamp(0, 9), (0, 9)),
        (lambda x: (torch.arange(3) * 2 + 1).clamp(max=4).flip(0), (1, 4)),
        (lambda x: torch.where(torch.arange(3) < 0, torch.arange(3) + 3, torch.arange(3)), (0, 2)),
        (lambda x: x.clamp(0, 9), None),  # of NaN it is NaN
        (lambda x: x.clamp(0, 9).long(), (-(1 << 63), (1 << 63) - 1)),
        (lambda x: torch.arange(200).to(torch.int8), (-128, 127)),
        (lambda x: torch.arange(0.9, 4.9, dtype=torch.int64), (0, 3)),
    ],
)
def test_intervals_are_as_small_as_indices_need(
    function: Callable[[Tensor], Tensor], expected: tuple[float, float] | None
) -> None:
    graph = make_fx(function, decomposition_table=decomposition_table())(torch.randn(4, 4)).graph
    (result,) = graph.output_node().all_input_nodes
    assert Intervals(graph, [result]).of(result) == expected

"""Where `rrelu` draws nothing, its slopes are eager's, and so is what flows back."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lowering.decompositions import decomposition_table

aten = torch.ops.aten
FORWARD, BACKWARD = (
    aten.rrelu_with_noise_functional.default,
    aten.rrelu_with_noise_backward.default,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_trained_has_the_mean_slope(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y, noise = FORWARD(x, torch.ones_like(x), 0.1, 0.4, False)
        given = [BACKWARD(y + 1, x, noise, 0.1, 0.4, False, is_y) for is_y in (False, True)]
        return [y, noise, *given]

    x = torch.tensor([-2.0, -0.0, 0.0, 3.0, torch.nan, -torch.inf], dtype=dtype)
    graph = make_fx(function, dict(decomposition_table()))(x)
    assert not {FORWARD, BACKWARD} & {node.target for node in graph.graph.nodes}
    torch.testing.assert_close(graph(x), function(x), equal_nan=True)

"""What is rewritten for the target computes what eager does, gradients too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tolerances import assert_same

ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, 0),
    "amax": lambda x: x.amax(-1),
    "argmax": lambda x: x.argmax(-1),
    "sum": lambda x: x.sum(-1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
}


@pytest.mark.parametrize("length", [1, 17, 197])
def test_rows_that_no_vector_divides(length: int) -> None:
    x = torch.randn(5, length)
    x[1, -1], x[2, 0], x[3], x[4] = float("nan"), float("inf"), -float("inf"), float("inf")

    def reduce(x: torch.Tensor) -> list[torch.Tensor]:
        return [reduction(x) for reduction in ROWS.values()]

    compiled = torch.compile(reduce, backend="npu_iree", options={"fallback": "error"})
    assert_same(compiled(x), reduce(x))


def test_convolutions_along_one_dimension_and_their_gradients() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv1d(3, 6, 3, stride=2, padding=1),
        torch.nn.Conv1d(6, 6, 4, dilation=2, padding=3, groups=6),
        torch.nn.GELU(),
    )
    compiled = torch.compile(model, backend="npu_iree", options={"fallback": "error"})
    given = torch.randn(2, 3, 37)
    results = []
    for call in (model, compiled):
        model.zero_grad()
        x = given.clone().requires_grad_()
        y = call(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in model.parameters())])
    assert_same(results[1], results[0])

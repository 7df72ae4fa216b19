"""Losses are eager's, where PyTorch's own decompositions are not."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowering.decompositions import losses

aten = torch.ops.aten


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_classes_end_at_the_first_that_is_none(data: st.DataObject) -> None:
    shape = [data.draw(st.integers(1, 5)) for _ in range(data.draw(st.integers(1, 2)))]
    x, target = torch.randn(shape), torch.randint(-1, shape[-1], shape)
    reduction = data.draw(st.integers(0, 2))
    expected = aten.multilabel_margin_loss_forward.default(x, target, reduction)
    actual = losses.multilabel_margin_loss(x, target, reduction)
    torch.testing.assert_close(actual, expected)


def test_a_huber_loss_is_of_the_dtype_of_its_first_argument() -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
    x, target = torch.randn(2, 5)
    for one, other, reduction in itertools.product(dtypes[:3], dtypes, range(3)):
        args = x.to(one), target.to(other), reduction, 0.5
        torch.testing.assert_close(losses.huber_loss(*args), aten.huber_loss(*args))

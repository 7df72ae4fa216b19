"""Pooling of any window: values and indices are PyTorch's, also where all is -inf or NaN."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowering.decompositions import pooling

aten = torch.ops.aten


def pair(data: st.DataObject, low: int, high: int) -> list[int]:
    return data.draw(st.lists(st.integers(low, high), min_size=2, max_size=2))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_values_and_indices_are_pytorchs(data: st.DataObject) -> None:
    kernel = pair(data, 1, 3)
    padding = [data.draw(st.integers(0, k // 2)) for k in kernel]
    steps, apart = pair(data, 1, 3), pair(data, 1, 2)
    arguments: list[Any] = [kernel, steps, padding, apart, data.draw(st.booleans())]
    lead = data.draw(st.sampled_from([(2, 3), (3,)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(*lead, *pair(data, 1, 6), generator=generator)
    special = torch.rand(x.shape, generator=generator)
    x = x.masked_fill(special < 0.2, -float("inf")).masked_fill(special > 0.9, float("nan"))
    try:
        expected = aten.max_pool2d_with_indices.default(x, *arguments)
    except RuntimeError:  # the window is larger than the input
        assume(False)
    for size, k, step, pad, d in zip(x.shape[-2:], *arguments[:4], strict=True):
        starts = range(-pad, size + pad, step)
        inside = [any(0 <= s + i * d < size for i in range(k)) for s in starts if s < size]
        assume(all(inside))  # else PyTorch's own index is in the padding
    actual = pooling.max_pool2d(x, *arguments)
    if actual is not NotImplemented:
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    elif arguments[-1] or x.dim() == 3:
        raise AssertionError("it is left to torch-mlir, which refuses it")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_averages_of_a_window_in_one_place_are_pytorchs(data: st.DataObject) -> None:
    kernel = pair(data, 1, 6)
    padding = [data.draw(st.integers(0, k // 2)) for k in kernel]
    arguments: list[Any] = [kernel, pair(data, 1, 3), padding, data.draw(st.booleans())]
    arguments += [data.draw(st.booleans()), data.draw(st.sampled_from([None, 1, 7]))]
    lead = data.draw(st.sampled_from([(2, 3), (3,)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(*lead, *pair(data, 1, 6), generator=generator)
    try:
        expected = aten.avg_pool2d.default(x, *arguments)
    except RuntimeError:  # the window is larger than the input
        assume(False)
    actual = pooling.avg_pool2d(x, *arguments)
    assume(actual is not NotImplemented)
    torch.testing.assert_close(actual, expected)

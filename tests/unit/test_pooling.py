"""Pooling of any window, and its gradients, are PyTorch's, also where all is -inf or NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from lowering.decompositions import adaptive, decomposition_table, maxima, padding, pooling

aten = torch.ops.aten


def numbers(data: st.DataObject, count: int, low: int, high: int) -> list[int]:
    return data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count))


def pair(data: st.DataObject, low: int, high: int) -> list[int]:
    return numbers(data, 2, low, high)


def drawn(data: st.DataObject, *shape: int, special: bool = False) -> torch.Tensor:
    """Numbers, among them equal ones; if they are to be special, some are -inf and some NaN."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = (torch.randn(shape, generator=generator) * 4).round() / 4
    if not special:
        return x
    kind = torch.rand(shape, generator=generator)
    return x.masked_fill(kind < 0.2, -float("inf")).masked_fill(kind > 0.9, float("nan"))


def assume_indices_inside(sizes: Sequence[int], arguments: Sequence[Any]) -> None:
    """Leave out windows that PyTorch's own index points to the padding of."""
    for size, k, step, pad, d in zip(sizes, *arguments[:4], strict=True):
        starts = range(-pad, size + pad, step)
        inside = [any(0 <= s + i * d < size for i in range(k)) for s in starts if s < size]
        assume(all(inside))


def assert_equal(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, equal_nan=True)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_maxima_and_their_places_and_what_flows_back(data: st.DataObject) -> None:
    kernel = pair(data, 1, data.draw(st.sampled_from([3, 7])))
    padding = [data.draw(st.integers(0, k // 2)) for k in kernel]
    steps, apart = pair(data, 1, 3), pair(data, 1, 2)
    arguments: list[Any] = [kernel, steps, padding, apart, data.draw(st.booleans())]
    lead = data.draw(st.sampled_from([(2, 3), (3,)]))
    x = drawn(data, *lead, *pair(data, 1, 12), special=True)
    if data.draw(st.booleans()):
        x = x.nan_to_num(0.0, neginf=-8.0).to(torch.int64)
    try:
        expected = aten.max_pool2d_with_indices.default(x, *arguments)
    except RuntimeError:  # the window is larger than the input
        assume(False)
    assume_indices_inside(x.shape[-2:], arguments)
    for one, other in zip(maxima.max_pool2d(x, *arguments), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    gradient = drawn(data, *expected[0].shape)
    places = expected[1]
    actual = maxima.max_pool2d_backward(gradient, x.float(), *arguments, places)
    backward = aten.max_pool2d_with_indices_backward.default
    assert_equal(actual, backward(gradient, x.float(), *arguments, places))


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
    if data.draw(st.booleans()):
        x = (x * 9).to(torch.int64)
    try:
        expected = aten.avg_pool2d.default(x, *arguments)
    except RuntimeError:  # the window is larger than the input
        assume(False)
    actual = pooling.avg_pool2d(x, *arguments)
    assume(actual is not NotImplemented)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("sizes", [(2, 3, 8, 6), (3, 8, 6), (2, 3, 7, 6)], ids=str)
def test_windows_of_one_place_are_never_left_to_torch_mlir_with_ceil_mode(
    sizes: tuple[int, ...], mode: str
) -> None:
    def function(x: torch.Tensor) -> Any:
        return aten.avg_pool2d.default(x, [2, 1], [], [0, 0], True)

    x = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    graph = make_fx(function, dict(decomposition_table()), mode)(x)
    pools = [node for node in graph.graph.nodes if node.target == aten.avg_pool2d.default]
    assert [node.args[0].meta["val"].dim() for node in pools] == [4]
    assert not any(node.args[4:5] == (True,) for node in pools)
    torch.testing.assert_close(graph(x), function(x))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_average_pooling_in_3_dimensions_and_its_gradient(data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([2, 3]))
    forward, backward = {
        2: (aten.avg_pool2d.default, aten.avg_pool2d_backward.default),
        3: (aten.avg_pool3d.default, aten.avg_pool3d_backward.default),
    }[rank]
    kernel = numbers(data, rank, 1, 4)
    pads = [data.draw(st.integers(0, k // 2)) for k in kernel]
    arguments: list[Any] = [kernel, numbers(data, rank, 1, 3), pads, data.draw(st.booleans())]
    arguments += [data.draw(st.booleans()), data.draw(st.sampled_from([None, 3]))]
    lead = data.draw(st.sampled_from([(2, 3), (3,)]))
    x = drawn(data, *lead, *numbers(data, rank, 1, 6))
    try:
        expected = forward(x, *arguments)
    except RuntimeError:  # the window is larger than the input
        assume(False)
    if rank == 3:
        assert_equal(pooling.avg_pool3d(x, *arguments), expected)
    gradient = drawn(data, *expected.shape)
    actual = pooling.avg_pool_backward(rank, gradient, x, *arguments)
    assert_equal(actual, backward(gradient, x, *arguments))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_max_pooling_in_3_dimensions_and_its_gradient(data: st.DataObject) -> None:
    kernel = numbers(data, 3, 1, 3)
    pads = [data.draw(st.integers(0, k // 2)) for k in kernel]
    arguments: list[Any] = [kernel, numbers(data, 3, 1, 3), pads]
    arguments += [numbers(data, 3, 1, 2), data.draw(st.booleans())]
    x = drawn(
        data, *data.draw(st.sampled_from([(2, 3), (3,)])), *numbers(data, 3, 1, 5), special=True
    )
    try:
        expected = aten.max_pool3d_with_indices.default(x, *arguments)
    except RuntimeError:  # the window is larger than the input
        assume(False)
    assume_indices_inside(x.shape[-3:], arguments)
    assert_equal(maxima.max_pool3d(x, *arguments), expected)
    gradient = drawn(data, *expected[0].shape)
    actual = maxima.max_pool3d_backward(gradient, x, *arguments, expected[1])
    backward = aten.max_pool3d_with_indices_backward.default
    assert_equal(actual, backward(gradient, x, *arguments, expected[1]))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_adaptive_pooling_and_its_gradients(data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([2, 3]))
    of_max, max_backward, avg_backward = {
        2: (
            aten.adaptive_max_pool2d.default,
            aten.adaptive_max_pool2d_backward.default,
            aten._adaptive_avg_pool2d_backward.default,
        ),
        3: (
            aten.adaptive_max_pool3d.default,
            aten.adaptive_max_pool3d_backward.default,
            aten._adaptive_avg_pool3d_backward.default,
        ),
    }[rank]
    lead = data.draw(st.sampled_from([(2, 3), (3,)]))
    x = drawn(data, *lead, *numbers(data, rank, 1, 9 if rank == 2 else 5), special=True)
    size = numbers(data, rank, 1, 7)
    expected = of_max(x, size)
    assert_equal(adaptive.adaptive_max_pool(x, size), expected)
    gradient = drawn(data, *expected[0].shape)
    actual = maxima.given_back(rank, gradient, x, expected[1])
    assert_equal(actual, max_backward(gradient, x, expected[1]))
    actual = adaptive.adaptive_avg_pool_backward(rank, gradient, x)
    assert_equal(actual, avg_backward(gradient, x))


@pytest.mark.parametrize("rank", [2, 3])
def test_adaptive_pooling_of_any_size(rank: int) -> None:
    of_max, of_avg, avg_backward = {
        2: (
            aten.adaptive_max_pool2d.default,
            aten._adaptive_avg_pool2d.default,
            aten._adaptive_avg_pool2d_backward.default,
        ),
        3: (
            aten.adaptive_max_pool3d.default,
            aten._adaptive_avg_pool3d.default,
            aten._adaptive_avg_pool3d_backward.default,
        ),
    }[rank]

    def function(x: torch.Tensor) -> Any:
        averages = of_avg(x, [3, 7, 2][:rank])
        return of_max(x, [3, 7, 2][:rank]), averages, avg_backward(averages.abs(), x)

    generator = torch.Generator().manual_seed(0)
    x, *others = (
        (torch.randn(2, 3, *sizes[:rank], generator=generator) * 2).round()
        for sizes in ([8, 9, 7], [6, 14, 4], [2, 3, 2], [7, 11, 5])
    )
    graph = make_fx(function, dict(decomposition_table()), "symbolic")(x)
    assert not {of_max, of_avg, avg_backward} & {node.target for node in graph.graph.nodes}
    for other in (x, *others):
        other[0, 0] = -torch.inf
        other[0, 1, 1:, 1:] = torch.where(other[0, 1, 1:, 1:] > 0, torch.nan, 1.0)
        assert_equal(graph(other), function(other))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_gradients_of_edges_that_were_repeated(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 3))
    forward, backward = {
        1: (aten.replication_pad1d.default, aten.replication_pad1d_backward.default),
        2: (aten.replication_pad2d.default, aten.replication_pad2d_backward.default),
        3: (aten.replication_pad3d.default, aten.replication_pad3d_backward.default),
    }[rank]
    x = drawn(data, 2, 3, *numbers(data, rank, 1, 5))
    amounts = numbers(data, 2 * rank, -3, 3)
    try:
        gradient = drawn(data, *forward(x, amounts).shape)
    except RuntimeError:  # nothing is left
        assume(False)
    actual = padding.replication_pad_backward(gradient, x, amounts)
    assume(actual is not NotImplemented)
    assert_equal(actual, backward(gradient, x, amounts))

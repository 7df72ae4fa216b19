"""Elements put by a mask or a diagonal, counted, and sums of windows and bags, are PyTorch's."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from lowering.decompositions import (
    bags,
    decomposition_table,
    indexing,
    overlaps,
    scatters,
    weight_norm,
)

aten = torch.ops.aten
SIZES = st.integers(1, 5)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_a_mask_puts_and_gives_back(data: st.DataObject) -> None:
    shape = [data.draw(SIZES) for _ in range(3)]
    x, source = torch.randn(shape), torch.randn(5, 5, 6)
    mask = torch.rand(shape[data.draw(st.integers(0, 2)) :]) < data.draw(st.floats(0, 1))
    expected = aten.masked_scatter.default(x, mask, source)
    torch.testing.assert_close(scatters.masked_scatter(x, mask, source), expected)
    wide = mask.expand(shape)
    actual = scatters.masked_scatter_backward(x, wide, source.shape)
    expected = aten.masked_scatter_backward.default(x, wide, source.shape)
    torch.testing.assert_close(actual, expected)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_grid_of_indices_adds_along_one_dimension_after_the_other(data: st.DataObject) -> None:
    rank, first = data.draw(st.integers(2, 3)), data.draw(st.integers(0, 1))
    shape = [data.draw(SIZES) for _ in range(first + rank + data.draw(st.integers(0, 1)))]
    counts = [data.draw(st.integers(2, 6)) for _ in range(rank)]
    index = [
        torch.randint(-size, size, [count, *(1 for _ in counts[k + 1 :])])
        for k, (size, count) in enumerate(zip(shape[first:], counts, strict=False))
    ]
    sizes = [*shape[:first], *counts, *shape[first + rank :]]
    values = torch.randint(-9, 10, sizes[data.draw(st.integers(0, len(sizes))) :]).float()
    x = torch.randint(-9, 10, shape).float()  # whose sums are exact, in any order
    places = [*[None] * first, *index]
    expected = aten.index_put.default(x, places, values, True)
    assert torch.equal(indexing.index_put(x, places, values, True), expected)


def test_what_flows_back_through_a_resize_is_put_by_one_index_at_a_time() -> None:
    rows, columns = torch.tensor([[0], [0], [1]]), torch.tensor([1, 0, 1, 2])

    def back(x: torch.Tensor, gradient: torch.Tensor) -> Any:
        return indexing.index_put(x, [None, rows, columns], gradient, True)

    graph = make_fx(back)(torch.zeros(2, 2, 3), torch.ones(2, 3, 4)).graph
    puts = graph.find_nodes(op="call_function", target=aten.index_put.default)
    assert len(puts) == 2


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rows_that_are_added(data: st.DataObject) -> None:
    shape = [data.draw(SIZES) for _ in range(3)]
    dim, count = data.draw(st.integers(0, 2)), data.draw(SIZES)
    sizes = [*shape[:dim], count, *shape[dim + 1 :]]
    given = [n if d <= dim and data.draw(st.booleans()) else 1 for d, n in enumerate(sizes)]
    index = torch.randint(0, shape[dim], given).expand(sizes)
    source = torch.randint(-9, 10, [n + data.draw(st.integers(0, 1)) for n in sizes]).float()
    x = torch.randint(-9, 10, shape).float()  # whose sums are exact, in any order
    actual = indexing.scatter_add(x, dim - data.draw(st.sampled_from([0, 3])), index, source)
    assert (actual is NotImplemented) == (dim == 2)
    if actual is not NotImplemented:
        expected = aten.scatter_add.default(x, dim, index, source)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_windows_are_summed_where_they_lie(data: st.DataObject) -> None:
    sizes = [data.draw(SIZES), data.draw(st.integers(1, 20)), data.draw(SIZES)]
    dim = data.draw(st.integers(0, 2))
    arguments = (dim, data.draw(st.integers(1, sizes[dim])), data.draw(st.integers(1, 7)))
    shape = torch.empty(sizes).unfold(*arguments).shape
    gradient = torch.randint(-9, 10, shape).float()  # whose sums are exact, in any order
    expected = aten.unfold_backward.default(gradient, sizes, *arguments)
    actual = overlaps.unfold_backward(gradient, sizes, *arguments)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, check_stride=True)


def test_few_long_windows_take_little_memory() -> None:
    arguments = ([200_004], 0, 200_000, 1)
    gradient = torch.randn(5, 200_000)
    expected = aten.unfold_backward.default(gradient, *arguments)
    torch.testing.assert_close(overlaps.unfold_backward(gradient, *arguments), expected)
    actual = overlaps.unfold_backward(gradient[0, :1], [], 0, 1, 1)  # of a scalar
    torch.testing.assert_close(actual, gradient[0, 0])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_diagonal_that_is_put(data: st.DataObject) -> None:
    x = torch.randn([data.draw(SIZES) for _ in range(3)])
    first, second = data.draw(st.permutations([0, 1, 2]))[:2]
    offset = data.draw(st.integers(1 - x.shape[first], x.shape[second] - 1))
    arguments = (offset, first, second - data.draw(st.sampled_from([0, 3])))
    source = torch.randn(torch.diagonal(x, *arguments).shape, dtype=torch.float64)
    expected = aten.diagonal_scatter.default(x, source, *arguments)
    actual = scatters.diagonal_scatter(x, source, *arguments)
    torch.testing.assert_close(actual, expected)
    assert actual.is_contiguous()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([-1.0, 0.0, 0.3, 1, 2, 2.5, 6.99, 7, 8, torch.inf, torch.nan])),
    st.sampled_from([(8, 0, 7), (8, 0, 8), (3, -1, 2), (1, 0, 1)]),
)
def test_what_is_counted(numbers: list[float], bounds: tuple[int, int, int]) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    torch.testing.assert_close(scatters.histc(x, *bounds), aten.histc.default(x, *bounds))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_bags_and_their_gradients(data: st.DataObject) -> None:
    length, rows = data.draw(st.integers(1, 12)), 6
    indices = torch.tensor([data.draw(st.integers(0, rows - 1)) for _ in range(length)])
    starts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    has_end = data.draw(st.booleans())
    end = data.draw(st.sampled_from([length, max([0, *starts])]))
    offsets = torch.tensor([0, *starts, *([end] if has_end else [])])
    mode, padding = data.draw(st.sampled_from([0, 1])), data.draw(st.sampled_from([-1, 2]))
    weighs = mode == 0 and data.draw(st.booleans())
    weight = torch.randn(rows, 3, dtype=data.draw(st.sampled_from([torch.float32, torch.float64])))
    per_sample = torch.randn(length, dtype=weight.dtype) if weighs else None
    arguments: list[Any] = [weight, indices, offsets, False, mode, False, per_sample, has_end]
    expected = aten._embedding_bag.default(*arguments, padding)
    bag = bags.embedding_bag(*arguments, padding)
    torch.testing.assert_close(bag[0], expected[0])
    if has_end and end < length:  # of which eager's backward kernels know nothing
        return
    gradient = torch.randn(bag[0].shape, dtype=weight.dtype)
    rest = [rows, False, mode, False, per_sample, padding]
    actual = bags.embedding_bag_backward(gradient, indices, offsets, *bag[1:], *rest)
    backward = aten._embedding_bag_backward.default
    torch.testing.assert_close(actual, backward(gradient, indices, offsets, *expected[1:], *rest))
    if weighs:
        given_ = (gradient, weight, indices, offsets, bag[1], mode, padding)
        op = aten._embedding_bag_per_sample_weights_backward.default
        torch.testing.assert_close(bags.weights_backward(*given_), op(*given_))


def test_what_is_beyond_the_last_bag_has_no_gradient() -> None:
    indices, offsets = torch.tensor([0, 3, 1, 3, 2, 3]), torch.tensor([0, 1, 4])
    held, bag = indices[:4], torch.tensor([0, 1, 1, 1])
    weight, per_sample = torch.randn(4, 3, requires_grad=True), torch.randn(6, requires_grad=True)
    gradient = torch.randn(2, 3)
    rows = weight[held] * per_sample[:4, None]
    reference = torch.zeros(2, 3).index_add(0, bag, rows)
    expected = torch.autograd.grad(reference, (weight, per_sample), gradient)
    ours = bags.embedding_bag(weight, indices, offsets, False, 0, False, per_sample, True)
    torch.testing.assert_close(ours[0], reference)
    rest = [4, False, 0, False, per_sample]
    actual = (
        bags.embedding_bag_backward(gradient, indices, offsets, *ours[1:], *rest),
        bags.weights_backward(gradient, weight, indices, offsets, ours[1], 0),
    )
    torch.testing.assert_close(actual, expected)


def test_gradients_of_a_norm_of_weights() -> None:
    three = [4, 3, 5]
    for dim, shape, lengths in ((0, three, [4, 1, 1]), (2, three, [1, 1, 5]), (0, [5], [5])):
        v, g = (torch.randn(sizes, requires_grad=True) for sizes in (shape, lengths))
        weight, norms = aten._weight_norm_interface.default(v, g, dim)
        ours = weight_norm.weight_norm(v, g, dim)
        torch.testing.assert_close(ours, (weight, norms.view(g.shape)))
        of_all = decomposition_table()[aten.norm.Scalar](v, 3)
        torch.testing.assert_close(of_all, aten.norm.Scalar(v, 3))
        gradient = torch.randn(weight.shape)
        expected = torch.autograd.grad(weight, (v, g), gradient)
        actual = weight_norm.weight_norm_backward(gradient, v, g, norms.view(g.shape), dim)
        torch.testing.assert_close(actual, expected)

"""Rewritten graphs compute what they did before: run with PyTorch's own kernels, of any shape."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from lowering.capture import capture_aot
from lowering.decompositions import decomposition_table
from lowering.rewrites import rewrite, sums
from lowering.rewrites.channels_last import images_of
from lowering.rewrites.recorder import Recorder
from lowering.rewrites.windows import MOST_PLACES
from npu_iree.targets import NPU_LOCAL
from tolerances import assert_same

aten = torch.ops.aten
TARGET = NPU_LOCAL.compile
Tensors = tuple[torch.Tensor, ...]


def graph_of(function: Callable[..., Any], *args: torch.Tensor, mode: str = "real") -> Any:
    traced = make_fx(function, decomposition_table=decomposition_table(), tracing_mode=mode)(*args)
    return capture_aot(traced).graph_module


def assert_close_to_largest(actual: Tensors, expected: Tensors) -> None:
    """Compare with a tolerance of the largest number: sums in another order differ, then cancel."""
    for one, other in zip(actual, expected, strict=True):
        largest = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * largest, equal_nan=True)


def ops(graph_module: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"]


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[Any]]:
    """Draw tensors (input, weight, bias?) and the other arguments of `aten.convolution` in 1-d."""
    groups = draw(st.integers(1, 3))
    kernel, size = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    channels = groups * draw(st.integers(1, 2))
    features = groups * draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    shapes = [(draw(st.integers(1, 3)), channels, size), (features, channels // groups, kernel)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    if draw(st.booleans()):
        tensors.append(torch.randn(features, generator=generator, dtype=torch.float64))
    window = [[draw(st.integers(1, 4))], [draw(st.integers(0, 3))], [draw(st.integers(1, 3))]]
    return tensors, [*window, False, [0], groups]


@settings(max_examples=20, deadline=None)
@given(calls())
def test_a_convolution_along_one_dimension(call: tuple[list[torch.Tensor], list[Any]]) -> None:
    tensors, rest = call

    def convolve(*given: torch.Tensor) -> torch.Tensor:
        return aten.convolution.default(*(*given, None)[:3], *rest)

    try:
        expected = convolve(*tensors)
    except RuntimeError:  # the window is larger than the input
        assume(False)
    rewritten = rewrite(graph_of(convolve, *tensors), TARGET)
    groups, (features, width, _) = rest[-1], tensors[1].shape
    is_written_out = groups == 1 or (width == 1 and groups == features)
    assert ("aten.convolution.default" not in ops(rewritten)) == is_written_out
    assert_same(rewritten(*tensors), expected)


@settings(max_examples=30, deadline=None)
@given(calls())
def test_its_gradients(call: tuple[list[torch.Tensor], list[Any]]) -> None:
    tensors, rest = call
    x, weight = tensors[:2]
    try:
        y = aten.convolution.default(x, weight, None, *rest)
    except RuntimeError:  # the window is larger than the input
        assume(False)

    def differentiate(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return aten.convolution_backward.default(*given, [weight.shape[0]], *rest, [True] * 3)

    given_tensors = (torch.randn_like(y), x, weight)
    rewritten = rewrite(graph_of(differentiate, *given_tensors), TARGET)
    assert "aten.convolution_backward.default" not in ops(rewritten)
    assert_same(tuple(rewritten(*given_tensors)), differentiate(*given_tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 6])
def test_it_keeps_dtype_nan_and_infinity(dtype: torch.dtype, groups: int) -> None:
    x = torch.randn(2, 6, 11)
    x[0, 1, 3], x[0, 2, 5], x[1, 0, 0] = float("nan"), float("inf"), -float("inf")
    x, weight = x.to(dtype), torch.randn(6, 6 // groups, 3).to(dtype)

    def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv1d(x, weight, padding=1, groups=groups)

    rewritten = rewrite(graph_of(convolve, x, weight), TARGET)
    assert_same(rewritten(x, weight), convolve(x, weight))


def pair_of(data: st.DataObject, low: int, high: int) -> list[int]:
    return data.draw(st.lists(st.integers(low, high), min_size=2, max_size=2))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_each_channel_by_itself_in_two_dimensions(data: st.DataObject) -> None:
    pair = functools.partial(pair_of, data)
    kernel, stride, padding, dilation = pair(1, 3), pair(1, 2), pair(0, 2), pair(1, 2)
    x, weight = torch.randn(2, 3, *pair(4, 7)).double(), torch.randn(3, 1, *kernel).double()

    def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, weight, None, stride, padding, dilation, 3)

    try:
        expected = convolve(x, weight)
    except RuntimeError:  # the window is larger than the input
        assume(False)
    rewritten = rewrite(graph_of(convolve, x, weight), TARGET)
    assert "aten.convolution.default" not in ops(rewritten)
    assert_same(rewritten(x, weight), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_groups_of_halves_are_convolved_as_floats(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 8, 5, 6), (12, 2, 3, 3), (12,)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    def convolve(*given: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(*given, stride=2, padding=1, groups=4)

    rewritten = rewrite(graph_of(convolve, *tensors), TARGET)
    assert_same(rewritten(*tensors), convolve(*(t.float() for t in tensors)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_volumes_are_images(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, 5, 9, 7), (16, 3, 3, 3, 3), (16,)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    def convolve(*given: torch.Tensor) -> torch.Tensor:
        window = [2, 1, 1], [1, 1, 0], [1, 1, 2]
        return aten.convolution.default(*given, *window, False, [0, 0, 0], 1)

    rewritten = rewrite(graph_of(convolve, *tensors), TARGET)
    found = rewritten.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert all(node.meta["val"].dim() == 4 for node in found)
    assert_same(rewritten(*tensors), convolve(*tensors))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_images(data: st.DataObject) -> None:
    pair = functools.partial(pair_of, data)
    kernel, stride, padding, dilation = pair(1, 6), pair(1, 3), pair(0, 2), pair(1, 2)
    if data.draw(st.booleans()):
        stride, padding, dilation = kernel, [0, 0], [1, 1]
    features = data.draw(st.sampled_from([3, 16]))
    x, weight = (
        torch.randn(data.draw(st.integers(1, 3)), 4, *pair(1, 20)),
        torch.randn(features, 4, *kernel),
    )
    bias = torch.randn(features) if data.draw(st.booleans()) else None

    def convolve(*given: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(*(*given, None)[:3], stride, padding, dilation)

    tensors = [x, weight] if bias is None else [x, weight, bias]
    try:
        expected = convolve(*tensors)
    except RuntimeError:  # the window is larger than the input
        assume(False)
    rewritten = rewrite(graph_of(convolve, *tensors), TARGET)
    places, is_small = kernel[0] * kernel[1], x.shape[2] * x.shape[3] <= 256
    is_product = stride == kernel and not any(padding) and dilation == [1, 1]
    is_product, is_written = is_product or places == 1, is_small and places <= 32
    if features == 16 or is_product or not is_written:  # some CPUs have blocks for 3 features
        made = is_product or is_written
        assert ("aten.convolution.default" not in ops(rewritten)) == made
    torch.testing.assert_close(rewritten(*tensors), expected, rtol=1e-4, atol=1e-4)


def is_convolved_over_batch(gradient: torch.Tensor, kernel: Sequence[int]) -> bool:
    count, features, height, width = gradient.shape
    pieces = [n for n in range(1, height // 2 + 1) if height % n == 0 and n * count >= 4]
    return features == 32 and 1 not in (width, *kernel) and bool(pieces)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_gradients_of_images(data: st.DataObject) -> None:
    pair = functools.partial(pair_of, data)
    kernel, stride, padding, dilation = pair(1, 9), pair(1, 3), pair(0, 2), pair(1, 2)
    count, features = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([3, 32]))
    x, weight = torch.randn(count, 4, *pair(1, 20)), torch.randn(features, 4, *kernel)
    mask = [*pair_of(data, 0, 1), 1]
    rest = stride, padding, dilation, False, [0, 0], 1
    try:
        gradient = torch.randn_like(aten.convolution.default(x, weight, None, *rest))
    except RuntimeError:  # the window is larger than the input
        assume(False)

    def differentiate(*given: torch.Tensor) -> list[torch.Tensor]:
        made = aten.convolution_backward.default(*given, [features], *rest, [*map(bool, mask)])
        return [value for value, is_made in zip(made, mask, strict=True) if is_made]

    tensors = gradient, x, weight
    rewritten = rewrite(graph_of(differentiate, *tensors), TARGET)
    of_phase = math.prod(-(-size // step) for size, step in zip(kernel, stride, strict=True))
    is_many, is_apart = math.prod(kernel) > 64, stride != [1, 1] and of_phase > MOST_PLACES
    is_left = "aten.convolution_backward.default" in ops(rewritten)
    is_many = is_many and not is_convolved_over_batch(gradient, kernel)
    assert is_left == bool((mask[1] and is_many) or (mask[0] and is_apart))
    for one, other in zip(rewritten(*tensors), differentiate(*tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


@st.composite
def moves(draw: st.DrawFn) -> Callable[[torch.Tensor], torch.Tensor]:
    """Draw slices and permutations, one after the other."""
    made: list[tuple[Any, ...]] = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            made.append((aten.permute.default, draw(st.permutations(range(4)))))
        else:
            begin, end = draw(st.integers(-4, 4)), draw(st.integers(-4, 99))
            dim, step = draw(st.integers(-4, 3)), draw(st.integers(1, 3))
            made.append((aten.slice.Tensor, dim, begin, end, step))
    return lambda x: functools.reduce(lambda y, move: move[0](y, *move[1:]), made, x)


@settings(max_examples=25, deadline=None)
@given(moves())
def test_moves_of_what_is_broadcast(move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = torch.randn(9, 1, 1, 1), torch.randn(1, 10, 1), torch.randn(11)

    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return move((a * b).exp() + c.where(c > 0, 1))

    assert_same(rewrite(graph_of(function, *tensors), TARGET)(*tensors), function(*tensors))


def largest_move(graph_module: fx.GraphModule) -> int:
    nodes = [n for n in graph_module.graph.nodes if str(n.target).startswith("aten.slice")]
    return max(n.meta["val"].numel() for n in nodes)


@pytest.mark.parametrize(
    ("rows", "width", "ends", "is_rewritten"),
    [
        (1, 20, [(0, 10), (10, 20)], True),
        (1, 20, [(0, 20), (5, 19)], False),  # much would be computed twice
        (9, 20, [(0, 10), (10, 20)], False),  # a tensor is as large as the result
    ],
)
def test_small_tensors_are_moved_instead_where_that_is_less(
    rows: int, width: int, ends: list[tuple[int, int]], is_rewritten: bool
) -> None:
    tensors = torch.randn(9, 1), torch.randn(rows, width)

    def function(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        product = a * b
        return [product[:, begin:end].exp() for begin, end in ends]

    rewritten = rewrite(graph_of(function, *tensors), TARGET)
    assert (largest_move(rewritten) <= width) == is_rewritten
    assert_same(rewritten(*tensors), function(*tensors))


class Dense(fx.Interpreter):
    """Runs a graph as a device does, whose values are dense, whatever made them."""

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, made)


def images_permuted(graph_module: fx.GraphModule) -> int:
    nodes = [n for n in graph_module.graph.nodes if n.target is aten.permute.default]
    images = [n.meta["val"] for n in nodes if n.meta["val"].ndim == 4]
    return sum(image.shape.numel() > max(image.shape) for image in images)


# Between two convolutions: of an image [N, 6, H, W], what broadcasts to it, and another image.
STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "batch_norm": lambda x, c, y: (x - c.view(-1, 1, 1)) * c.view(1, -1, 1, 1),
    "relu": lambda x, c, y: x.clamp(0, 6),
    "gelu": lambda x, c, y: torch.nn.functional.gelu(x, approximate="tanh"),
    "where": lambda x, c, y: torch.where(x > c[0], x, y),
    "residual": lambda x, c, y: torch.add(x, y, alpha=2),
    "by_width": lambda x, c, y: x * x.mean([0, 1, 2]),
    "squeezed": lambda x, c, y: x * x.mean([2, 3], keepdim=True).sigmoid(),
    "max_pool": lambda x, c, y: torch.max_pool2d(x, 3, 1, 1),
    "wide_pool": lambda x, c, y: torch.max_pool2d(pad(x, (1, 1)), (1, 3), 1, (0, 1), (1, 2)),
    "pad": lambda x, c, y: pad(x, (1, 0, 2, -1), value=0.5)[..., 1:, 1:],
    "cat": lambda x, c, y: torch.cat([x[:, 3:], y[:, :3]], 1),
    "flat": lambda x, c, y: (x.flatten(2) + c.view(-1, 1)).view(x.shape),
    "sums": lambda x, c, y: x - x.sum([0, 2, 3], True) + x.sum([0, 2, 3]).view(-1, 1, 1),
    "copies": lambda x, c, y: aten.alias.default(x.clone()),
    "places": lambda x, c, y: torch.where(x.unsqueeze(-1) > c, x.unsqueeze(-1), c).mean(-1),
    "repeated": lambda x, c, y: x + (c.view(1, -1, 1, 1).expand(x.shape) / 49),
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_between_convolutions_channels_stay_last(step: str) -> None:
    x, c = torch.randn(2, 3, 5, 7), torch.randn(6)
    one, two = torch.randn(6, 3, 1, 1), torch.randn(4, 6, 1, 1)

    def network(x: torch.Tensor, c: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        y = torch.conv2d(x, weights[0])
        return torch.conv2d(STEPS[step](y, c, y + 1), weights[1]).mean((2, 3))

    rewritten = rewrite(graph_of(network, x, c, one, two), TARGET)
    assert images_permuted(rewritten) == 1  # what is given
    torch.testing.assert_close(Dense(rewritten).run(x, c, one, two), network(x, c, one, two))


def test_another_order_is_made_of_channels_last() -> None:
    x, weight = torch.randn(2, 3, 5, 7), torch.randn(6, 3, 1, 1)

    def network(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.conv2d(x, weight).relu().permute(3, 1, 0, 2) * 2

    rewritten = rewrite(graph_of(network, x, weight), TARGET)
    assert images_permuted(rewritten) == 2  # what is given, and this
    torch.testing.assert_close(Dense(rewritten).run(x, weight), network(x, weight))


@pytest.mark.parametrize("sizes", [(6, 6, 5), (6, 5)])
def test_what_has_fewer_dimensions_and_as_many_numbers(sizes: tuple[int, ...]) -> None:
    x, c = torch.randn(1, 3, *sizes[-2:]), torch.randn(6)
    weight = torch.randn(6 if len(sizes) == 3 else 1, 3, 1, 1)

    def network(x: torch.Tensor, c: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.conv2d(x, weight) * c.view(-1, *[1] * (len(sizes) - 1)).expand(sizes)

    rewritten = rewrite(graph_of(network, x, c, weight), TARGET)
    torch.testing.assert_close(Dense(rewritten).run(x, c, weight), network(x, c, weight))


@pytest.mark.sweep
@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=5), st.booleans(), st.data())
def test_channels_last_in_any_order(steps: list[str], is_output: bool, data: st.DataObject) -> None:
    count, height, width = (data.draw(st.integers(1, 6)) for _ in range(3))
    height, width = height + 2, width + 2
    tensors = torch.randn(count, 3, height, width), torch.randn(6), torch.randn(6, 3, 1, 1)

    def network(x: torch.Tensor, c: torch.Tensor, weight: torch.Tensor) -> Tensors:
        y = other = torch.conv2d(x, weight)
        for step in steps:
            y, other = STEPS[step](y, c, other), y
        return (y, other.transpose(1, 3)) if is_output else (y.sum((2, 3)), y.mT.relu())

    rewritten = rewrite(graph_of(network, *tensors), TARGET)
    assert_close_to_largest(Dense(rewritten).run(*tensors), network(*tensors))


@pytest.mark.parametrize(("kernel", "is_written_out"), [(5, True), (6, False)])
def test_a_pool_of_many_places_is_left_as_it_is(kernel: int, is_written_out: bool) -> None:
    x = torch.randn(1, 9, 9, 3)
    rewritten = rewrite(
        graph_of(lambda x: torch.max_pool2d(x.permute(0, 3, 1, 2), kernel), x), TARGET
    )
    assert ("aten.max_pool2d_with_indices.default" not in ops(rewritten)) == is_written_out
    assert_same(rewritten(x), torch.max_pool2d(x.permute(0, 3, 1, 2), kernel))


def test_a_pool_finds_nan_and_infinity_wherever_channels_are() -> None:
    x = torch.randn(1, 3, 9, 9)
    x[0, 0, 4, 4], x[0, 1], x[0, 2, 0, 0] = float("nan"), -float("inf"), float("inf")
    eye = torch.eye(3).view(3, 3, 1, 1)

    def network(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.max_pool2d(x.permute(0, 2, 3, 1).permute(0, 3, 1, 2), 3, 2, 1)

    rewritten = rewrite(graph_of(network, x, eye), TARGET)
    assert "aten.max_pool2d_with_indices.default" not in ops(rewritten)
    assert_same(rewritten(x, eye), network(x, eye))


# After a product of [N, L, 6]: what broadcasts to it, and another of its shape.
ROW_STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "bias": lambda x, c, y: x + c,
    "scale": lambda x, c, y: 2 * x * c.view(1, 1, 6) + c[:1],
    "gelu": lambda x, c, y: torch.nn.functional.gelu(x, approximate="tanh"),
    "residual": lambda x, c, y: torch.add(y, x, alpha=2),
    "where": lambda x, c, y: torch.where(x > c[0], x, y),
    "norm": lambda x, c, y: x - x.mean(-1, keepdim=True),
    "of one batch": lambda x, c, y: x * y[:1],
    "of one place": lambda x, c, y: x * y[:, :1],
    "half": lambda x, c, y: x.half().float(),
    "other shape": lambda x, c, y: (x.reshape(-1, 3, 2) * 2).view(x.shape),
    "transposed": lambda x, c, y: (x.mT * 2).mT.contiguous(),
}
AS_MATRICES = ("bias", "scale", "gelu", "residual", "where", "half")


def product_network(steps: list[str]) -> Callable[..., torch.Tensor]:
    def network(x: torch.Tensor, c: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, other = torch.nn.functional.linear(x, weight), x
        for step in steps:
            y, other = ROW_STEPS[step](y, c, other), y
        return torch.nn.functional.linear(y, weight)

    return network


@pytest.mark.parametrize("step", AS_MATRICES)
def test_between_products_matrices_stay_matrices(step: str) -> None:
    tensors = torch.randn(2, 5, 6), torch.randn(6), torch.randn(6, 6)
    network = product_network([step])
    rewritten = rewrite(graph_of(network, *tensors), TARGET)
    wide = [n for n in rewritten.graph.nodes if n.op == "call_function" and n.meta["val"].ndim > 2]
    assert {n.target for n in wide} <= {aten.view.default}
    torch.testing.assert_close(Dense(rewritten).run(*tensors), network(*tensors))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(sorted(ROW_STEPS)), max_size=5), st.data())
def test_matrices_in_any_order(steps: list[str], data: st.DataObject) -> None:
    count, places = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    tensors = torch.randn(count, places, 6), torch.randn(6), torch.randn(6, 6)
    network = product_network(steps)
    rewritten = rewrite(graph_of(network, *tensors), TARGET)
    assert_close_to_largest((Dense(rewritten).run(*tensors),), (network(*tensors),))


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_sums_of_sums(data: st.DataObject) -> None:
    """Of any dimensions and sizes: what is long is short here."""
    x = torch.randn(data.draw(st.lists(st.integers(1, 11), min_size=1, max_size=4)))
    every = st.integers(-x.dim(), x.dim() - 1)
    dims = data.draw(st.lists(every, min_size=1, max_size=x.dim(), unique_by=lambda d: d % x.dim()))
    keepdim, op = data.draw(st.booleans()), data.draw(st.sampled_from([torch.sum, torch.mean]))

    def reduced(x: torch.Tensor) -> list[torch.Tensor]:
        return [op(x), op(x, dims, keepdim)]

    with patch.multiple(sums, _MOST=3, _LONG=4, _LONG_ROW=4, _LONG_ROWS=8, _FEW=2):
        rewritten = rewrite(graph_of(reduced, x), TARGET)
    assert_close_to_largest(rewritten(x), reduced(x))
    for node in rewritten.graph.nodes:
        if node.target in sums.RULES:
            (source,) = node.all_input_nodes
            count = source.meta["val"].numel() // node.meta["val"].numel()
            assert count <= 8


def test_a_sum_of_no_dimensions_is_left_as_it_is() -> None:
    graph = graph_of(lambda x: [x.sum(0), x.mean(-1)], torch.tensor(2.0))
    assert rewrite(graph, TARGET) is graph


def test_a_target_lists_its_rewrites() -> None:
    x, weight = torch.randn(1, 4, 9), torch.randn(4, 4, 3)
    graph = graph_of(torch.conv1d, x, weight)
    assert rewrite(graph, replace(TARGET, rewrites=())) is graph
    assert rewrite(graph, TARGET) is not graph


def test_dynamic_sizes_are_left_as_they_are() -> None:
    x, weight = torch.randn(2, 4, 9), torch.randn(4, 4, 3)
    graph = graph_of(torch.conv1d, x, weight, mode="symbolic")
    assert rewrite(graph, TARGET) is graph


def test_new_nodes_tell_the_users_line_and_what_they_are() -> None:
    x, weight = torch.randn(1, 4, 9), torch.randn(4, 4, 3)
    graph = graph_of(torch.conv1d, x, weight)
    (old,) = [n for n in graph.graph.nodes if n.target is aten.convolution.default]
    old.meta["stack_trace"] = "here"
    for node in rewrite(graph, TARGET).graph.nodes:
        if node.op == "call_function":
            assert node.meta["stack_trace"] == "here"
            assert isinstance(node.meta["val"], torch.Tensor)
            assert "tensor_meta" not in node.meta  # of the old node


@pytest.mark.parametrize(
    ("rows", "kind", "is_transposed", "is_rewritten"),
    [
        (1, torch.float32, True, True),
        (2, torch.float32, True, False),
        (1, torch.float32, False, False),
        (1, torch.float16, True, False),  # a product with a vector would sum in halves
        (1, torch.float64, True, False),
    ],
)
def test_a_product_of_one_row_reads_its_matrix_by_rows(
    rows: int, kind: torch.dtype, is_transposed: bool, is_rewritten: bool
) -> None:
    x, weight = torch.randn(rows, 7).to(kind), torch.randn(5, 7).to(kind)

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ (weight.t() if is_transposed else weight)

    args = (x, weight if is_transposed else weight.t().contiguous())
    rewritten = rewrite(graph_of(product, *args), TARGET)
    assert ("aten.mv.default" in ops(rewritten)) == is_rewritten
    assert_same(rewritten(*args), product(*args))


def test_a_matrix_whose_dimensions_stay_in_place_is_not_transposed() -> None:
    x, weight = torch.randn(1, 5), torch.randn(5, 5)
    rewritten = rewrite(graph_of(lambda x, w: x @ w.permute(0, 1), x, weight), TARGET)
    assert_same(rewritten(x, weight), x @ weight)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_products_by_repeated_matrices(data: st.DataObject) -> None:
    heads, times, m, k, n = (data.draw(st.integers(1, 4)) for _ in range(5))
    is_transposed, is_side_by_side = data.draw(st.booleans()), data.draw(st.booleans())
    x = torch.randn(heads * times, m, k).double()
    matrices = torch.randn(heads, n, k).double()

    def product(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        dim, sizes = (1, (-1, times, -1, -1)) if is_side_by_side else (0, (times, -1, -1, -1))
        repeated = matrices.unsqueeze(dim).expand(sizes).reshape(heads * times, n, k)
        return torch.bmm(x, repeated.mT if is_transposed else repeated.reshape(-1, k, n))

    graph = graph_of(product, x, matrices)
    rewritten = rewrite(graph, TARGET)
    is_repeated = times > 1 and (is_side_by_side or heads == 1)
    assert (rewritten is not graph) == (is_repeated or n == 1)
    if is_repeated:
        (node,) = [n for n in rewritten.graph.nodes if n.target is aten.bmm.default]
        assert node.meta["val"].shape == (heads, times * m, n)
    assert_same(rewritten(x, matrices), product(x, matrices))


def test_a_product_by_a_broadcast_matrix_has_one_batch() -> None:
    x, matrix = torch.randn(6, 2, 3), torch.randn(1, 3, 4)
    rewritten = rewrite(graph_of(lambda x, m: torch.bmm(x, m.expand(6, 3, 4)), x, matrix), TARGET)
    (node,) = [n for n in rewritten.graph.nodes if n.target is aten.bmm.default]
    assert node.meta["val"].shape == (1, 12, 4)
    assert_same(rewritten(x, matrix), torch.bmm(x, matrix.expand(6, 3, 4)))


@pytest.mark.parametrize(
    ("dtype", "columns", "is_rewritten"),
    [(torch.float32, 1, True), (torch.float32, 2, False), (torch.bfloat16, 1, False)],
)
def test_products_with_vectors_pack_nothing(
    dtype: torch.dtype, columns: int, is_rewritten: bool
) -> None:
    x, vectors = torch.randn(3, 5, 4).to(dtype), torch.randn(3, 4, columns).to(dtype)
    rewritten = rewrite(graph_of(torch.bmm, x, vectors), TARGET)
    assert ("aten.bmm.default" not in ops(rewritten)) == is_rewritten
    assert_same(rewritten(x, vectors), torch.bmm(x, vectors))


def test_ops_that_are_whole_stay_whole() -> None:
    """Those that the user keeps, and of what rewrites write those that the target keeps."""

    def activated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu((x @ weight).view(2, 2, 5)).view(4, 5)

    args = torch.randn(4, 3), torch.randn(3, 5)
    traced = make_fx(activated, decomposition_table=decomposition_table(["aten.silu"]))(*args)
    rewritten = rewrite(capture_aot(traced).graph_module, TARGET)
    assert ops(rewritten) == ["aten.mm.default", "aten.silu.default", "aten.view.default"]
    (x, *_), graph = rewritten.graph.nodes, fx.Graph()
    kept = Recorder(graph, frozenset({"aten.silu"})).record(aten.silu.default, (x,), {})
    assert kept.target is aten.silu.default


@pytest.mark.parametrize("is_converted_first", [False, True])
def test_a_product_by_a_matrix_of_bytes_reads_the_bytes(is_converted_first: bool) -> None:
    x, matrix = torch.randn(3, 4).bfloat16(), torch.randint(-9, 9, (5, 4), dtype=torch.int8)

    def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return x @ (matrix.to(x.dtype).t() if is_converted_first else matrix.t().to(x.dtype))

    rewritten = rewrite(graph_of(product, x, matrix), TARGET)
    (node,) = [n for n in rewritten.graph.nodes if n.target is aten.mm.default]
    assert node.meta["val"].dtype == torch.float32
    assert_same(rewritten(x, matrix), product(x, matrix))


def test_what_no_rewrite_knows_is_left_as_it_is() -> None:
    """An op with two results; keywords; a tensor from elsewhere."""
    x, weight = torch.randn(2, 3, 1, 1), torch.randn(4, 3, 1, 1)
    graph = graph_of(
        lambda x, w: (*torch.frexp(torch.conv2d(x, w)), torch.mm(x[0, 0], x[1, 0])), x, weight
    )
    assert "aten.frexp.Tensor" in ops(rewrite(graph, TARGET))
    added = graph_of(lambda x: x.sum(0, keepdim=True), torch.randn(5))
    (node,) = [n for n in added.graph.nodes if n.target is aten.sum.dim_IntList]
    node.args, node.kwargs = node.args[:2], {"keepdim": True}
    with patch.multiple(sums, _LONG_ROW=2, _LONG=2, _MOST=2):
        assert rewrite(added, TARGET) is added
    recorder = Recorder(fx.Graph())
    assert recorder.record(lambda: x, (), {}) is NotImplemented


@pytest.mark.parametrize("kernel", [5, 6])
def test_images_are_what_is_computed_with_channels_last(kernel: int) -> None:
    x, weight = torch.randn(1, 3, 9, 9), torch.randn(4, 3, 1, 1)
    graph = graph_of(lambda x, w: torch.max_pool2d(torch.conv2d(x, w), kernel), x, weight)
    targets = [node.target for node in images_of(graph.graph)]
    assert (operator.getitem in targets) == (kernel == 5)


def test_what_is_repeated_is_written_once() -> None:
    x, weight, c = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 1, 1), torch.randn(2, 4, 1, 1)

    def network(x: torch.Tensor, weight: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        y, mean = torch.conv2d(x, weight), c.expand(2, 4, 5, 5) / 25
        return (y + mean) * (y - mean)

    rewritten = rewrite(graph_of(network, x, weight, c), TARGET)
    assert ops(rewritten).count("aten.div.Tensor") == 1
    assert_close_to_largest((rewritten(x, weight, c),), (network(x, weight, c),))

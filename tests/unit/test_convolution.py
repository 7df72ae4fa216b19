"""Convolutions written as other convolutions are still the same, of any shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from lowering.decompositions import convolution
from lowering.rewrites.gradients_of_any_size import of_any_size
from lowering.rewrites.transposed_convolutions import of_either_kind

aten = torch.ops.aten


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[object]]:
    """Draw the tensors (input, weight, bias) and the other arguments of `aten.convolution`."""
    rank, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    transposed = draw(st.booleans())

    def each(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))

    stride, padding, dilation, kernel = each(1, 3), each(0, 2), each(1, 2), each(1, 4)
    most = [max(pair) - 1 for pair in zip(stride, dilation, strict=True)]
    more = [draw(st.integers(0, m)) if transposed else 0 for m in most]
    c, f = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 3))
    size = [*each(3, 7)]
    ends = (c, f // groups) if transposed else (f, c // groups)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    shapes = [(2, c, *size), (*ends, *kernel), (f,)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return tensors, [stride, padding, dilation, transposed, more, groups]


@settings(max_examples=120, deadline=None)
@given(calls())
def test_a_convolution_and_its_gradients(call: tuple[list[torch.Tensor], list[object]]) -> None:
    tensors, rest = call
    try:
        expected = aten.convolution.default(*tensors, *rest)
    except RuntimeError:  # the window is larger than the input
        assume(False)
    assume(expected.numel() > 0)
    actual = convolution.convolution(*tensors, *rest)
    if actual is not NotImplemented:
        torch.testing.assert_close(actual, expected)
        assert actual.is_contiguous() == expected.is_contiguous()
    rewritten = of_either_kind(*tensors, *rest)
    if rewritten is not NotImplemented:
        torch.testing.assert_close(rewritten, expected)
    x, weight, bias = tensors
    backward = (torch.randn_like(expected), x, weight, list(bias.shape), *rest, [True] * 3)
    gradients = convolution.convolution_backward(*backward)
    eagers = aten.convolution_backward.default(*backward)
    is_plain = not rest[3] and rest[5] == 1 and x.dim() < 5
    assert gradients is not NotImplemented or is_plain
    if gradients is not NotImplemented:
        torch.testing.assert_close(gradients, eagers)
    # What is written for any size is right for these, too.
    if not any(is_padded_by_more(weight, *rest)):
        torch.testing.assert_close(of_any_size(*backward), eagers)


def test_a_transposed_weight_has_the_gradient_of_one_that_convolves() -> None:
    x, weight, gradient = torch.randn(2, 4, 5), torch.randn(4, 3, 4), torch.randn(2, 3, 10)
    rest = None, [2], [1], [1], True, [0], 1, [False, True, False]
    graph = make_fx(lambda *args: convolution.convolution_backward(*args, *rest))(
        gradient, x, weight
    ).graph
    (call,) = graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    assert not call.args[7], "which rewrites know"
    assert not graph.find_nodes(op="call_function", target=aten.convolution.default)


def test_no_images_leave_grouped_weights_no_gradients() -> None:
    x = torch.randn(0, 4, 5, 5)
    for groups in (2, 4):
        weight = torch.randn(8, 4 // groups, 3, 3)
        places = [1, 1], [0, 0], [1, 1], False, [0, 0], groups
        backward = (torch.randn(0, 8, 3, 3), x, weight, [8], *places, [True] * 3)
        found = convolution.convolution_backward(*backward)
        torch.testing.assert_close(found, aten.convolution_backward.default(*backward))


def is_padded_by_more(
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    *_: object,
) -> list[bool]:
    """Say for each dimension whether it is padded by more than a window reaches: not written so."""
    if transposed or max(stride) > 1:
        return [False]
    reach = (d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True))
    return [pad > most for pad, most in zip(padding, reach, strict=True)]


def test_more_padding_than_a_window_reaches() -> None:
    """torch-mlir would pad the gradient by less than nothing."""
    x, weight = torch.randn(2, 1, 12), torch.randn(4, 1, 2)
    rest = [1], [2], [1], False, [0], 1
    gradient = torch.randn_like(aten.convolution.default(x, weight, None, *rest))
    backward = gradient, x, weight, None, *rest, [True, True, False]
    gradients = convolution.convolution_backward(*backward)
    torch.testing.assert_close(gradients, aten.convolution_backward.default(*backward))

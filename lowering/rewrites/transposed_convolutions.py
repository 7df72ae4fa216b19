"""Convolutions, transposed ones among them: these are what flows back through a convolution."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowering.decompositions.halves import widened
from lowering.rewrites.convolutions import convolution
from lowering.rewrites.gradients_of_input import gradient_of_input, is_without_zeros
from lowering.rewrites.rule import Rule
from lowering.rewrites.windows import Window
from lowering.sizes import are_empty, is_static, of_each

aten = torch.ops.aten


def of_either_kind(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """Rewrite `aten.convolution`: as `convolution`, or as the gradient of what one convolved.

    Before: %y = convolution(%x, %w, %b, stride [8], padding [4], transposed)  with %w of [F, C, 16]
    After:  %y = `gradient_of_input`(%x, ...) + view(%b, [C, 1])

    Args:
        x: `[N, F, ...]` of a transposed one.
        weight: `[F, C / groups, ...]` of a transposed one.
        bias: `[C]` or None.
        stride, padding, dilation, output_padding, groups: as for `aten.convolution`.
        transposed: whether it is one.
    """
    window = Window.of(x.dim() - 2, weight.shape[2:], stride, padding, dilation)
    if not transposed:
        return convolution(x, weight, bias, window, groups)
    output_padding = of_each(output_padding, x.dim() - 2)
    is_taken = x.dtype.is_floating_point and is_static(weight) and not are_empty(x, weight)
    is_seen = all(map(operator.lt, output_padding, window.stride))  # what is added at the end
    if not is_taken or not is_seen or not is_without_zeros(window, groups):
        return NotImplemented
    each = zip(x.shape[2:], *window, output_padding, strict=True)
    sizes = [
        (n - 1) * step - 2 * pad + apart * (size - 1) + 1 + more
        for n, size, step, pad, apart, more in each
    ]
    y = gradient_of_input(widened(x), sizes, widened(weight), window, groups)
    if bias is not None:
        y = y + widened(bias).view(-1, *(1 for _ in sizes))
    return y.to(x.dtype)


RULES: Mapping[Any, Rule] = {
    aten.convolution.default: Rule(of_either_kind, is_dynamic=True),
}

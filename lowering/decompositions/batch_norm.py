"""Batch norm in inference as eager's CPU kernel computes it: one product and one sum per element.

PyTorch's own decomposition makes 17 nodes of each; ResNet-50 has 53. Tracing those alone took a
third of a first call that compiles nothing, and all of them then go through the compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import get_decompositions

aten = torch.ops.aten
_OP = aten._native_batch_norm_legit_no_training
_PYTORCHS = get_decompositions([_OP])[_OP.default]


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    momentum: float,
    eps: float,
) -> Any:
    """Decompose `aten._native_batch_norm_legit_no_training`.

    Before: %y, %_, %_ = batch_norm(%x, %weight, %bias, %mean, %var, 0.1, 1e-5)
    After:  %scale = rsqrt(%var + 1e-5) * %weight
            %y = %x * view(%scale) + view(%bias - %mean * %scale)

    Args:
        x: `[N, C, ...]`. In f16 and bf16 the intermediate values are of more digits than the
            result, which PyTorch's own decomposition takes care of.
        weight: `[C]`, as are bias, mean and var.
        bias: may be None, as the weight.
        mean: of the running statistics.
        var: of the running statistics.
        momentum: not used in inference.
        eps: added to the variance.
    """
    if x.dtype not in (torch.float32, torch.float64) or mean.dtype != x.dtype:
        return _PYTORCHS(x, weight, bias, mean, var, momentum, eps)
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    sizes = [-1] + [1] * (x.dim() - 2)
    unused = x.new_empty((0,))  # the saved statistics, which only a CUDA kernel has
    return x * scale.view(sizes) + shift.view(sizes), unused, unused


DECOMPOSITIONS = {_OP.default: batch_norm}

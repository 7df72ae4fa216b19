"""Group norm for any batch: PyTorch's own decomposition asks for strides that are numbers."""

from __future__ import annotations

import torch

from lowering.decompositions.halves import widened

aten = torch.ops.aten


def group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    batch: int,
    channels: int,
    inner: int,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decompose `aten.native_group_norm`: one product and one sum per element, as eager's kernel.

    Args:
        x: `[N, C, ...]`.
        weight: `[C]` or None, as the bias.
        bias: added to the result.
        batch: N.
        channels: C.
        inner: elements of a channel.
        groups: of channels, which are normalized together.
        eps: added to the variance.

    Returns:
        The result, `[N, C, ...]`, and the mean and the reciprocal of the standard deviation of each
        group, `[N, groups]`.
    """
    wide = widened(x)
    grouped = wide.reshape(batch, groups, channels // groups * inner)
    variance, mean = torch.var_mean(grouped, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    scale = rstd.expand(batch, groups, channels // groups)
    if weight is not None:
        scale = scale * weight.reshape(groups, -1)
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias.reshape(groups, -1)
    sizes = [batch, channels, *[1] * (x.dim() - 2)]
    y = wide * scale.reshape(sizes) + shift.reshape(sizes)
    return y.to(x.dtype), mean.squeeze(-1).to(x.dtype), rstd.squeeze(-1).to(x.dtype)


DECOMPOSITIONS = {aten.native_group_norm.default: group_norm}

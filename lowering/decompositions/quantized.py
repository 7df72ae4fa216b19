"""Ops of quantized graphs (PT2E), as the ops that PyTorch itself computes them with.

`torch.ops.quantized_decomposed` is a library of custom ops that exists once it is imported. Its
kernels are written in ATen ops, which is what they are decomposed into; those that read a scale or
an offset out of a tensor are written here, since a graph cannot wait for a number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_KERNEL = torch._C.DispatchKey.CompositeExplicitAutograd
_OF_OPS = (
    "choose_qparams_per_token.default",
    "choose_qparams_per_token_asymmetric.default",
    "convert_element_type.no_fuse",
    "dequantize_per_channel.default",
    "dequantize_per_channel_group.default",
    "dequantize_per_tensor.default",
    "dequantize_per_token.default",
    "quantize_per_channel.default",
    "quantize_per_channel_group.default",
    "quantize_per_tensor.default",
    "quantize_per_token.default",
)


def quantize_per_tensor(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    low: int | torch.Tensor,
    high: int | torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Decompose `quantize_per_tensor` where scale and offset are tensors of one element."""
    inverse = (1.0 / scale.double()).reshape(()).to(torch.float32)
    shifted = torch.round(x.to(torch.float32) * inverse) + zero_point.reshape(())
    return torch.clamp(shifted, low, high).to(dtype)  # type: ignore[arg-type]


def dequantize_per_tensor(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    *_: Any,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Decompose `dequantize_per_tensor` where scale and offset are tensors of one element.

    What else it takes is for those who look for patterns: the bounds, and the dtype of `x`.
    """
    made = out_dtype or torch.float32
    return (x.to(made) - zero_point.reshape(()).to(made)) * scale.reshape(()).to(made)


_OURS: dict[str, Callable[..., Any]] = {
    "dequantize_per_tensor.tensor": dequantize_per_tensor,
    "quantize_per_tensor.tensor": quantize_per_tensor,
}


def of_libraries() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Return the decompositions of those of the ops that exist."""
    found: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
    for name in (*_OF_OPS, *_OURS):
        packet, overload = name.split(".")
        ops = getattr(torch.ops.quantized_decomposed, packet, None)
        if ops is not None and (op := getattr(ops, overload, None)) is not None:
            found[op] = _OURS.get(name) or functools.partial(op._op_dk, _KERNEL)
    return found

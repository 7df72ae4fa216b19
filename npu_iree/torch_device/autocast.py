"""`torch.autocast("npu")`: which ops run in the lower precision, and which in f32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from npu_iree.torch_device.current import NAME, is_on_npu

_KEY = "AutocastPrivateUse1"
_KEYS = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

# As on PyTorch's other devices: products in the lower precision,
LOWER = (
    "addbmm",
    "addmm",
    "addmv",
    "addr",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "einsum",
    "linalg_multi_dot",
    "linear",
    "matmul",
    "mm",
    "mv",
    "prelu",
    "scaled_dot_product_attention",
)
# and in f32 what sums much, or has values far apart.
FULL = (
    "acos",
    "asin",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cosine_similarity",
    "cosh",
    "cross_entropy_loss",
    "cumprod",
    "cumsum",
    "dist",
    "erfinv",
    "exp",
    "expm1",
    "group_norm",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_softmax.int",
    "logsumexp",
    "mse_loss",
    "nll_loss",
    "norm.Scalar",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "prod",
    "reciprocal",
    "rsqrt",
    "sinh",
    "smooth_l1_loss",
    "softmax.int",
    "softplus",
    "sum",
    "sum.dim_IntList",
    "tan",
)


def register_autocast() -> list[torch.library.Library]:
    """Register the casts; they last as long as what is returned."""
    library: Any = torch.library.Library
    others, aten = library("_", "IMPL"), library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY)
    for name in LOWER:
        aten.impl(name, _cast(name, is_lower=True), _KEY)
    for name in FULL:
        aten.impl(name, _cast(name, is_lower=False), _KEY)
    return [others, aten]


def _cast(name: str, *, is_lower: bool) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME) if is_lower else torch.float32

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            is_float = tensor.dtype.is_floating_point and tensor.dtype is not torch.float64
            return tensor.to(dtype) if is_float and is_on_npu(tensor) else tensor

        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            args, kwargs = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
            return op(*args, **kwargs)

    return call

"""`torch.autocast("npu")`: which ops run in the lower precision, and which in f32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
# What takes tensors of one dtype alone gets them in the widest of its own.
WIDEST = (
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "grid_sampler",
    "index_put",
    "scatter_add",
    "tensordot",
    "vdot",
)


def register_autocast() -> list[torch.library.Library]:
    """Register the casts; they last as long as what is returned."""
    library: Any = torch.library.Library
    others, aten = library("_", "IMPL"), library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY)
    for names, dtype_of in ((LOWER, _lower), (FULL, _full), (WIDEST, _widest)):
        for name in names:
            aten.impl(name, _cast(name, dtype_of), _KEY)
    return [others, aten]


def _lower(_: Sequence[torch.Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype(NAME)


def _full(_: Sequence[torch.Tensor]) -> torch.dtype:
    return torch.float32


def _widest(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    is_full = any(tensor.dtype is torch.float32 for tensor in tensors)
    return torch.float32 if is_full else _lower(tensors)


def _is_cast(value: Any) -> bool:
    """Say whether autocast changes the dtype of an argument."""
    if not is_on_npu(value):
        return False
    dtype: torch.dtype = value.dtype
    return dtype.is_floating_point and dtype is not torch.float64


def _cast(
    name: str, dtype_of: Callable[[Sequence[torch.Tensor]], torch.dtype]
) -> Callable[..., Any]:
    """Return an op that casts its floats to a dtype, which depends on them, and is computed so."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        dtype = dtype_of([leaf for leaf in leaves if _is_cast(leaf)])
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            cast = [leaf.to(dtype) if _is_cast(leaf) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(cast, tree)
            return op(*args, **kwargs)

    return call

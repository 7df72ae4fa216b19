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
    "_convolution",
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
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "einsum",
    "gru_cell",
    "linalg_multi_dot",
    "linalg_vecdot",
    "linear",
    "lstm_cell",
    "matmul",
    "mm",
    "mv",
    "prelu",
    "rnn_relu_cell",
    "rnn_tanh_cell",
    "scaled_dot_product_attention",
)
# and in f32 what sums much, or has values far apart.
FULL = (
    "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "acos",
    "asin",
    "binary_cross_entropy_with_logits",
    "cdist",
    "cosh",
    "cosine_embedding_loss",
    "cosine_similarity",
    "cross_entropy_loss",
    "cumprod",
    "cumsum",
    "dist",
    "erfinv",
    "exp",
    "expm1",
    "frobenius_norm.dim",
    "group_norm",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "linalg_vector_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_softmax.int",
    "logsumexp",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "native_layer_norm",
    "nll_loss",
    "nll_loss2d",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "pdist",
    "poisson_nll_loss",
    "pow.Scalar",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "prod",
    "prod.dim_int",
    "reciprocal",
    "renorm",
    "rms_norm",
    "rsqrt",
    "sinh",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softmax.int",
    "softplus",
    "sum",
    "sum.dim_IntList",
    "tan",
    "triplet_margin_loss",
    "upsample_bicubic2d",
    "upsample_bilinear2d",
    "upsample_linear1d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_trilinear3d",
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
    aten.impl("binary_cross_entropy", _refuse_cross_entropy, _KEY)
    return [others, aten]


def _refuse_cross_entropy(*_: Any, **__: Any) -> torch.Tensor:
    """Refuse, as PyTorch's other devices do.

    Raises:
        RuntimeError: probabilities of lower precision are too coarse near 0 and 1.
    """
    raise RuntimeError(
        f'binary_cross_entropy and nn.BCELoss are refused under torch.autocast("{NAME}"): halves '
        "near 0 and 1 are too coarse for their logarithms. Leave out the sigmoid before, and take "
        "binary_cross_entropy_with_logits or nn.BCEWithLogitsLoss; or compute it in float32 "
        f'within torch.autocast("{NAME}", enabled=False)'
    )


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

"""Programs for what PyTorch's table of ops does not reach, though real models use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from lowering.dtypes import DTYPES

Function = Callable[..., Any]

inf, nan = float("inf"), float("nan")
aten = torch.ops.aten

# Shapes of the arguments -> functions of tensors of those shapes, in any dtype.
ANY_DTYPE: dict[tuple[tuple[int, ...], ...], Sequence[Function]] = {
    ((4, 6),): (
        lambda x: x.clone(),
        lambda x: x.expand(3, 4, 6).clone(),
        lambda x: x.view(3, 8),
        lambda x: x.reshape(2, 2, 6).permute(2, 0, 1).contiguous(),
        lambda x: F.pad(x, (1, 2, 0, 1), value=1),
        lambda x: F.pad(x, (-1, 2)),
        lambda x: x.as_strided((3, 2), (6, 2), 1),
        lambda x: x.repeat(2, 3),
        lambda x: x.flip(0, 1),
        lambda x: x.roll(2, 1),
        lambda x: x.roll((1, 2), (0, 1)),
        lambda x: x.view(1, 2, 2, 6).roll((-1, -2), (1, 2)),
        lambda x: x.unsqueeze(1).squeeze(1),
        lambda x: x[1:3, ::2],
        lambda x: x[2],
        lambda x: x[..., -1],
        lambda x: torch.cat([x, x[:2], x[:0]]),
        lambda x: torch.stack([x, x], 1),
        lambda x: x.split(2, 1),
        lambda x: x.split([1, 3], 0),
        lambda x: x.unbind(1),
        lambda x: x.t(),
        lambda x: x.mT.diagonal(),
        lambda x: torch.full_like(x, 1),
        lambda x: torch.zeros_like(x),
        lambda x: x.new_full((2, 3), 1),
        lambda x: x.tril(),
        lambda x: x.triu(1),
        lambda x: x.masked_fill(x == x[0], 1),
        lambda x: torch.where(x == x[0], x, x[0]),
        lambda x: x[torch.tensor([2, 0, 1])],
        lambda x: x[torch.tensor([[2], [0]]), torch.tensor([1, 3])],
        lambda x: x[:, torch.tensor([1, 1])],
        lambda x: x.index_select(1, torch.tensor([5, 0])),
        lambda x: x.gather(1, torch.tensor([[1, 0], [2, 2], [5, 4], [3, 3]])),
        lambda x: x.index_put((torch.tensor([1, 2]),), x[:2]),
        lambda x: x.index_put((torch.tensor([1, 1]), torch.tensor([0, 0])), x[0, :2], True),
        lambda x: x.index_put((x == x[0],), x[0, 0]),
        lambda x: x.index_fill(0, torch.tensor([1]), 1),
        lambda x: x.index_copy(0, torch.tensor([1, 3]), x[:2]),
        lambda x: x.index_add(0, torch.tensor([1, 1]), x[:2]),
        lambda x: x.scatter(1, torch.tensor([[1, 0], [2, 3]]), x[:2, :2]),
        lambda x: x.scatter(1, torch.tensor([[1], [2], [0], [5]]), 1),
        lambda x: x.scatter(-1, torch.tensor([[1, 0], [2, 3]]), x[:2, :2]),
        lambda x: x.gather(-1, torch.tensor([[1, 0], [2, 2], [5, 4], [3, 3]])),
        lambda x: x.cumsum(-1),
        lambda x: x.scatter_add(0, torch.tensor([[1, 0, 1], [1, 0, 0]]), x[:2, :3]),
        lambda x: x.scatter_reduce(1, torch.tensor([[1, 0], [2, 3]]), x[:2, :2], "amax"),
        lambda x: torch.slice_scatter(x, x[:2], 0, 1, 3),
        lambda x: torch.slice_scatter(x, x[:, :3], 1, 0, 6, 2),
        lambda x: torch.select_scatter(x, x[0], 0, 2),
        lambda x: torch.diagonal_scatter(x, x[0, :4]),
        lambda x: aten.copy(x, x[0]),
        lambda x: x.cumsum(1),
        lambda x: x.sum(1, keepdim=True),
        lambda x: x.eq(x[0]).logical_and(x.ne(0)).logical_or(x == 1).logical_not(),
    ),
    ((4, 6), (4, 6)): (
        torch.add,
        torch.mul,
        lambda x, y: x == y,
        lambda x, y: torch.where(x == y, x, y),
        lambda x, y: torch.cat([x, y], 1),
        lambda x, y: aten.copy(x, y),
    ),
}

NUMBERS: dict[tuple[tuple[int, ...], ...], Sequence[Function]] = {
    ((4, 6),): (
        lambda x: x + 1,
        lambda x: 1 - x,
        lambda x: x * 2,
        lambda x: x**2,
        lambda x: x.clamp(-1, 2),
        lambda x: x.clamp(min=0),
        lambda x: x.argmax(1),
        lambda x: x.argmax(),
        lambda x: x.argmin(0),
        lambda x: x.max(1),
        lambda x: x.min(0),
        lambda x: x.amax((0, 1)),
        lambda x: x.topk(3),
        lambda x: x.topk(2, 0, largest=False),
        lambda x: x.sort(1),
        lambda x: x.sort(0, descending=True),
        lambda x: x.sort(stable=True, dim=1),
        lambda x: x.argsort(1),
        lambda x: x.relu(),
        lambda x: x.abs().neg(),
        lambda x: x.gt(0).sum(),
        lambda x: (x > 0, x < 1, x >= 2, x <= 1, x == 2, x != 0),
        lambda x: x.any(1) | x.all(1),
        lambda x: x.prod(1),
        lambda x: x.cumprod(1),
    ),
    ((4, 6), (4, 6)): (
        torch.sub,
        torch.div,
        torch.maximum,
        torch.minimum,
        lambda x, y: (x > y, x < y, x >= y, x <= y, x == y, x != y),
        lambda x, y: torch.div(x, y.abs() + 1, rounding_mode="floor"),
        lambda x, y: torch.div(x, y.abs() + 1, rounding_mode="trunc"),
        lambda x, y: torch.remainder(x, y.abs() + 2),
        lambda x, y: torch.fmod(x, y.abs() + 2),
        lambda x, y: torch.floor_divide(x, y.abs() + 2),
        lambda x, y: torch.pow(x.abs(), 3),
        lambda x, y: torch.pow(x.abs() + 1, y.abs()),
        lambda x, y: torch.pow(2, y.abs()),
    ),
    ((3, 4), (4, 5)): (torch.mm, torch.matmul),
    ((2, 3, 4), (2, 4, 5)): (torch.bmm, torch.matmul),
    ((2, 3, 4), (4, 5)): (torch.matmul,),
    ((5,), (3, 4), (4, 5)): (torch.addmm,),
    ((3, 4), (4,)): (torch.mv,),
    ((4,), (4,)): (torch.dot,),
}

INTEGERS: dict[tuple[tuple[int, ...], ...], Sequence[Function]] = {
    ((4, 6), (4, 6)): (
        torch.bitwise_and,
        torch.bitwise_or,
        torch.bitwise_xor,
        lambda x, y: x.bitwise_not(),
        lambda x, y: x & 1,
        lambda x, y: x << 1,
        lambda x, y: x.abs() >> 1,
        lambda x, y: x % 3,
        lambda x, y: x // 2,
    ),
}

FLOATS: dict[tuple[tuple[int, ...], ...], Sequence[Function]] = {
    ((4, 6),): (
        F.gelu,
        lambda x: F.gelu(x, approximate="tanh"),
        F.silu,
        F.mish,
        F.softplus,
        F.elu,
        F.hardswish,
        F.leaky_relu,
        lambda x: F.softmax(x, -1),
        lambda x: F.softmax(x, 0),
        lambda x: F.log_softmax(x, -1),
        lambda x: x.tanh() + x.sigmoid() + x.exp(),
        lambda x: x.abs().rsqrt() + x.abs().sqrt() + x.abs().log(),
        lambda x: x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * x,
        lambda x: x.abs() ** 0.5 + (x.abs() + 1) ** -1.5,
        lambda x: x.var(1) + x.std(1),
        lambda x: torch.var_mean(x, 1, correction=0),
        lambda x: x.norm(dim=1),
        lambda x: x.logsumexp(1),
        lambda x: F.layer_norm(x, (6,)),
        lambda x: F.rms_norm(x, (6,)),
        lambda x: F.cross_entropy(x, torch.tensor([1, 0, 5, 2])),
        lambda x: F.cross_entropy(x, torch.tensor([1, 0, -100, 2]), label_smoothing=0.1),
        lambda x: F.nll_loss(x, torch.tensor([1, 0, 5, 2]), reduction="sum"),
        lambda x: F.glu(x),
        lambda x: F.normalize(x),
        lambda x: F.embedding(torch.tensor([[1, 0], [3, 3]]), x),
        lambda x: F.embedding(torch.tensor([1, 0, 3]), x, padding_idx=0),
        lambda x: F.embedding_bag(torch.tensor([[1, 0], [3, 3]]), x),
        lambda x: x.sin() + x.cos(),
        lambda x: x.floor() + x.ceil() + x.round() + x.trunc(),
        lambda x: x.isnan() | x.isinf(),
        lambda x: x.masked_fill(torch.ones(4, 6).tril() == 0, -inf).softmax(-1),
        lambda x: x.quantile(0.5) if x.dtype == torch.float32 else x.median(),
    ),
    ((4, 6), (6,), (6,)): (lambda x, w, b: F.layer_norm(x, (6,), w, b),),
    ((2, 4, 5), (4,), (4,)): (lambda x, w, b: F.group_norm(x, 2, w, b) + F.prelu(x, w),),
    ((2, 3, 9), (6, 3, 3), (6,)): (
        F.conv1d,
        lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1),
        lambda x, w, b: F.conv1d(x, w, None, dilation=2, padding=2),
    ),
    ((2, 4, 9), (4, 1, 3)): (lambda x, w: F.conv1d(x, w, groups=4, padding=2),),
    ((2, 4, 9), (4, 3, 3)): (lambda x, w: F.conv_transpose1d(x, w, stride=2, padding=1),),
    ((2, 4, 8, 8), (6, 4, 3, 3), (6,)): (
        F.conv2d,
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
        lambda x, w, b: F.conv2d(x, w, None, padding="same", dilation=2),
    ),
    ((2, 4, 8, 8), (6, 2, 3, 3)): (lambda x, w: F.conv2d(x, w, groups=2, padding=1),),
    ((2, 4, 8, 8), (4, 1, 3, 3)): (lambda x, w: F.conv2d(x, w, groups=4, stride=2),),
    ((2, 4, 8, 8), (8, 1, 3, 3)): (lambda x, w: F.conv2d(x, w, groups=4),),
    ((2, 4, 8, 8), (8, 4, 1, 1)): (F.conv2d, lambda x, w: F.conv2d(x, w, stride=2)),
    ((2, 4, 5, 5), (4, 3, 3, 3), (3,)): (
        F.conv_transpose2d,
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
    ),
    ((2, 4, 5, 5), (4, 1, 3, 3)): (lambda x, w: F.conv_transpose2d(x, w, groups=4, stride=2),),
    ((1, 2, 5, 6, 7), (3, 2, 3, 3, 3)): (F.conv3d, lambda x, w: F.conv3d(x, w, stride=2)),
    ((2, 4, 8, 8),): (
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.max_pool2d(x, 2, return_indices=True),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
        lambda x: F.adaptive_max_pool2d(x, 2),
        lambda x: F.interpolate(x, scale_factor=2.0),
        lambda x: F.interpolate(x, size=(5, 11)),
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        lambda x: F.interpolate(x, size=(5, 3), mode="bilinear", align_corners=True),
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"),
        lambda x: F.pixel_shuffle(x, 2),
        lambda x: F.pad(x, (1, 1, 2, 2), mode="reflect"),
        lambda x: F.pad(x, (1, 1, 2, 2), mode="replicate"),
        lambda x: F.unfold(x, 3),
        lambda x: F.instance_norm(x),
        lambda x: F.local_response_norm(x, 3),
        lambda x: x.mean((2, 3)),
        lambda x: x.to(memory_format=torch.channels_last).relu(),
        lambda x: F.max_pool2d(x.to(memory_format=torch.channels_last), 2),
    ),
    ((2, 4, 9),): (lambda x: F.max_pool1d(x, 2), lambda x: F.avg_pool1d(x, 3, 2)),
    ((2, 2, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)): (
        F.scaled_dot_product_attention,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(5, 5).tril() > 0),
    ),
}

MODULES: tuple[tuple[Callable[[], nn.Module], tuple[int, ...]], ...] = (
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 5, 8)),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (2, 5, 8)),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (2, 3, 8, 8)),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), (2, 3, 8, 8)),
    (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3), nn.Softmax(-1)), (4, 6)),
    (lambda: nn.LSTM(4, 5, batch_first=True), (2, 3, 4)),
    (lambda: nn.GRU(4, 5, batch_first=True), (2, 3, 4)),
)

UNUSUAL = (
    inf,
    -inf,
    0.0,
    -0.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    100.0,
    -100.0,
    1e-6,
    3.0,
    -1.0,
    300.0,
    2,
)
NANS = (1.0, nan, 2.0, inf, -1.0, nan, nan, 0.0, 3.0, -inf, 5.0, nan, 0.5, -2.0, 4.0, -0.0)
ON_UNUSUAL: Sequence[Function] = (
    *(
        torch.exp,
        torch.log,
        torch.sqrt,
        torch.rsqrt,
        torch.tanh,
        torch.sigmoid,
        torch.relu,
        torch.abs,
    ),
    *(torch.isnan, torch.isinf, torch.isfinite, torch.sign, torch.round, torch.floor, torch.ceil),
    *(torch.erf, torch.log1p, torch.expm1, torch.reciprocal, torch.neg, torch.trunc, torch.sin),
    *(
        F.silu,
        F.softplus,
        F.leaky_relu,
        torch.logical_not,
        torch.sum,
        torch.amax,
        torch.amin,
        torch.cos,
    ),
    *(torch.mean, torch.argmax, torch.exp2, torch.log2, torch.square, F.hardswish, F.elu),
    lambda x: x.clamp(-1, 1),
    lambda x: x.pow(2) + x.pow(3) + x.pow(0.5) + x.pow(-1),
    lambda x: x.view(4, 4).amax(1),
    lambda x: x.view(4, 4).softmax(1),
    lambda x: x.view(4, 4).max(1),
    lambda x: x.view(4, 4).topk(2),
    lambda x: x.view(4, 4).sort(1),
    lambda x: torch.maximum(x, x.flip(0)),
    lambda x: torch.minimum(x, x.flip(0)),
    lambda x: x / x.flip(0),
    lambda x: x * x.flip(0),
    lambda x: x - x.flip(0),
    lambda x: torch.where(x > 0, x, x.flip(0)),
    lambda x: x.eq(x),
    lambda x: x.eq(x.flip(0)) | x.lt(x.flip(0)) | x.ge(x.flip(0)) | x.ne(x.flip(0)),
    lambda x: x.nan_to_num(),
    lambda x: x.cumsum(0),
    lambda x: x[2:].to(torch.bool),
)


def programs(dtype: torch.dtype) -> Iterator[tuple[Function, tuple[Any, ...]]]:
    """Give (function, arguments) of every program that has a meaning in `dtype`."""
    for table in _tables(dtype):
        for shapes, functions in table.items():
            for function in functions:
                yield function, tuple(_values(shape, dtype) for shape in shapes)
    for other in DTYPES.values():
        yield lambda x, to: x.to(to), (_values((3, 4), dtype), other)
        yield lambda x, y: aten.copy(x, y), (_values((3, 4), dtype), _values((3, 4), other))
    yield from _factories(dtype)
    if dtype.is_floating_point:
        for make, shape in MODULES:
            yield _module(make, dtype), (_state(make, dtype), _values(shape, dtype))
        for function in ON_UNUSUAL:
            yield function, (torch.tensor(UNUSUAL, dtype=dtype, requires_grad=True),)
            yield function, (torch.tensor(NANS, dtype=dtype, requires_grad=True),)


def _tables(dtype: torch.dtype) -> Iterator[dict[tuple[tuple[int, ...], ...], Sequence[Function]]]:
    yield ANY_DTYPE
    if dtype is not torch.bool and not dtype.is_complex:
        yield NUMBERS
    if dtype.is_floating_point:
        yield FLOATS
    elif not dtype.is_complex:
        yield INTEGERS


def _factories(dtype: torch.dtype) -> Iterator[tuple[Function, tuple[Any, ...]]]:
    yield lambda: torch.full((2, 3), 1, dtype=dtype), ()
    yield lambda: torch.zeros(2, 3, dtype=dtype), ()
    yield lambda: torch.ones((), dtype=dtype), ()
    yield lambda: torch.empty(2, 3, dtype=dtype), ()
    yield lambda: torch.eye(3, dtype=dtype), ()
    yield lambda: torch.scalar_tensor(1, dtype=dtype), ()
    if dtype is not torch.bool and not dtype.is_complex:
        yield lambda: torch.arange(5, dtype=dtype), ()
        yield lambda: torch.arange(2, 11, 3, dtype=dtype), ()


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, requires_grad=True)
    low, high = (0, 2) if dtype is torch.bool else (0 if dtype is torch.uint8 else -5, 9)
    return torch.randint(low, high, shape).to(dtype)


def _module(make: Callable[[], nn.Module], dtype: torch.dtype) -> Function:
    return lambda state, x: functional_call(make().to(dtype), state, (x,))


def _state(make: Callable[[], nn.Module], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    module = make().to(dtype)
    return dict(module.named_parameters()) | dict(module.named_buffers())

"""Convolutions as matrix products and as sums, for code generators that do these better.

Of a convolution along one dimension, IREE's CPU code is 9 to 25 times as slow as eager's
(`ci/bench_rewrites.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from lowering.halves import HALVES
from lowering.sizes import of_each

aten = torch.ops.aten
_UNCHANGED: Any = NotImplemented
# With more places in a window, writing all of them out costs more than it gains.
_MOST_PLACES = 32


def convolution(
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
    """Rewrite `aten.convolution` along one dimension.

    Before: %y = convolution(%x, %w, %b, ...)          with %x of [N, C, L], %w of [F, C, K]
    After:  %c = cat([slice(%x, 2, 0, ...), slice(%x, 2, 1, ...), ...], 1)       [N, K * C, M]
            %y = matmul(view(permute(%w, [0, 2, 1]), [F, K * C]), %c) + view(%b, [F, 1])

    A channel by itself (`groups` is C and F) is a sum of products, without the copy:

    After:  %y = slice(%x, 2, 0, ...) * %w[:, 0, 0] + slice(%x, 2, 1, ...) * %w[:, 0, 1] + ...

    Args:
        x: `[N, C, L]`, of floats.
        weight: `[F, C / groups, K]`.
        bias: `[F]` or None.
        stride, padding, dilation: of the window.
        transposed: left as it is.
        output_padding: of transposed ones.
        groups: 1, or C and F.
    """
    if x.dim() != 3 or transposed or not x.dtype.is_floating_point or 0 in x.shape:
        return _UNCHANGED
    places, channels, features = weight.shape[2], x.shape[1], weight.shape[0]
    is_by_channel = groups == channels == features
    if places > _MOST_PLACES or not (groups == 1 or is_by_channel):
        return _UNCHANGED
    (step,), (pad,), (apart,) = (of_each(v, 1) for v in (stride, padding, dilation))
    wide, wide_weight = (t.float() if t.dtype in HALVES else t for t in (x, weight))
    pieces = windows(wide, places, step, pad, apart)
    y = _by_channel(pieces, wide_weight) if is_by_channel else _product(pieces, wide_weight)
    if bias is not None:
        y = y + bias.to(y.dtype).unsqueeze(-1)
    return y.to(x.dtype)


def windows(x: torch.Tensor, places: int, step: int, pad: int, apart: int) -> list[torch.Tensor]:
    """Give for each place of a window what is there, wherever it stands: `[N, C, M]` each."""
    padded = aten.constant_pad_nd.default(x, [pad, pad], 0) if pad else x
    last = padded.shape[-1] - apart * (places - 1)
    starts = [place * apart for place in range(places)]
    return [aten.slice.Tensor(padded, 2, start, start + last, step) for start in starts]


def _product(pieces: Sequence[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    columns = torch.cat(list(pieces), 1)
    rows = weight.permute(0, 2, 1).reshape(weight.shape[0], -1)
    if columns.shape[0] == 1:
        return torch.mm(rows, columns[0]).unsqueeze(0)
    return torch.matmul(rows, columns)


def _by_channel(pieces: Sequence[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    products = [piece * weight[:, :, place] for place, piece in enumerate(pieces)]
    return functools.reduce(torch.add, products)


REWRITES = {aten.convolution.default: convolution}

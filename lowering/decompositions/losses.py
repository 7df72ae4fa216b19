"""Losses of which PyTorch's decompositions give other values than eager."""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import get_decompositions, meta_table

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # reductions; the third is the sum
_HUBER = aten.huber_loss.default
_PYTORCHS_HUBER = get_decompositions([_HUBER])[_HUBER]


def huber_loss(
    x: torch.Tensor, target: torch.Tensor, reduction: int = _MEAN, delta: float = 1.0
) -> Any:
    """Decompose `aten.huber_loss`; the loss is of the dtype of `x`, whatever the target's is.

    PyTorch's decomposition gives it the wider one of both.
    """
    if torch.result_type(x, target) is x.dtype:
        return _PYTORCHS_HUBER(x, target, reduction, delta)
    losses = _PYTORCHS_HUBER(x, target, _NONE, delta).to(x.dtype)
    if reduction == _NONE:
        return losses
    return losses.mean() if reduction == _MEAN else losses.sum()


def multilabel_margin_loss(
    x: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decompose `aten.multilabel_margin_loss_forward`.

    The classes of a row end at the first -1. PyTorch's decomposition takes what comes after it for
    class 0, and adds that to the loss.

    Args:
        x: `[N, C]`, or `[C]`.
        target: the classes of each row, of the same shape.
        reduction: none, the mean, or the sum.

    Returns:
        The loss, and for the backward of each class whether it is one of its row.
    """
    rows, classes = torch.atleast_2d(x, target)  # type: ignore[no-untyped-call]
    count = rows.shape[1]
    place = torch.arange(count, device=x.device)
    end = torch.amin(torch.where(classes == -1, place, count), -1, keepdim=True)
    is_given = place < end
    given = torch.where(is_given, classes, 0)
    is_target = ((given.unsqueeze(-1) == place) & is_given.unsqueeze(-1)).any(1)
    margins = 1 - torch.gather(rows, -1, given).unsqueeze(-1) + rows.unsqueeze(1)
    counts = is_given.unsqueeze(-1) & ~is_target.unsqueeze(1)
    losses = torch.where(counts, margins.clamp_min(0), 0).sum([1, 2]) / count
    if reduction == _NONE:
        losses = losses.reshape(target.shape[:-1])
    else:
        losses = losses.mean() if reduction == _MEAN else losses.sum()
    return losses, is_target.to(x.dtype).reshape(target.shape)


def replace_pytorchs() -> None:
    """Let PyTorch trace by ours what it takes apart before a table of decompositions is asked."""
    op = aten.multilabel_margin_loss_forward.default
    op.py_kernels[torch._C.DispatchKey.Autograd] = multilabel_margin_loss
    op._dispatch_cache.clear()
    meta_table[_HUBER] = _HUBER.py_kernels[torch._C.DispatchKey.Meta] = huber_loss
    _HUBER._dispatch_cache.clear()


DECOMPOSITIONS = {
    _HUBER: huber_loss,
    aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
}

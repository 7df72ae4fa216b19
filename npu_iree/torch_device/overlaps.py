"""Writes that PyTorch refuses: to one place several times, and over part of what is read."""

from __future__ import annotations

import re

import torch

from npu_iree.torch_device.storage import dense_order

_YES = 1  # of `at::MemOverlap`
_UNSUPPORTED = (
    "unsupported operation: {}. Please clone() the tensor before performing the operation."
)

# These may write to a place several times: it is the same each time, or PyTorch only warns.
REPEATS = re.compile(r"aten\.(fill|zero|masked_fill|masked_scatter|_?index_put|index_fill)")


def check_places(target: torch.Tensor) -> None:
    """Check that each element of what is written to has a place of its own.

    Raises:
        RuntimeError: it is expanded.
    """
    if torch._debug_has_internal_overlap(target) == _YES:
        what = "more than one element of the written-to tensor refers to a single memory location"
        raise RuntimeError(_UNSUPPORTED.format(what))


def would_overlap(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Say whether two tensors have some bytes in common, if they are of one storage.

    What is all the same, PyTorch allows; what is not dense, it does not look at.

    Source: `at::get_overlap_status`.
    """
    for tensor in (target, source):
        if not tensor.numel() or dense_order(tuple(tensor.shape), tensor.stride()) is None:
            return False
    start, end = _span(target)
    other_start, other_end = _span(source)
    if (start, end) == (other_start, other_end):
        return target.stride() != source.stride()
    return start < other_end and other_start < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + tensor.nbytes


def check_overlap(target: torch.Tensor, source: torch.Tensor) -> None:
    """Check that what is written to is all of what is read, or nothing of it.

    Raises:
        RuntimeError: it is a part of it.
    """
    is_shared = target.untyped_storage()._cdata == source.untyped_storage()._cdata
    if is_shared and would_overlap(target, source):
        what = (
            "some elements of the input tensor and the written-to tensor refer to a single memory "
            "location"
        )
        raise RuntimeError(_UNSUPPORTED.format(what))

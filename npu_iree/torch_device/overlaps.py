"""Writes that PyTorch refuses: to one place several times, and over part of what is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from npu_iree.frozen import storage_id
from npu_iree.torch_device.current import is_on_npu
from npu_iree.torch_device.storage import dense_order

_MASKS = (torch.bool, torch.uint8)
_YES = 1  # of `at::MemOverlap`
_UNSUPPORTED = (
    "unsupported operation: {}. Please clone() the tensor before performing the operation."
)

# These may write to a place several times: it is the same each time, or PyTorch only warns.
_REPEATS = re.compile(r"aten\.(fill|zero|masked_fill|_?index_put|index_fill)")
# These read, before they write, whatever they are given,
_FREE = re.compile(r"aten\.(fill|zero|masked_scatter)")
# and these a number, after a mask or an index;
_NUMBER_LAST = re.compile(r"aten\.(masked_fill|index_fill)")
# what these read is not even all of what is written to.
_APART = re.compile(r"aten\.(_?index_put|index_fill)")


def overlaps_of(
    op: str, targets: Sequence[torch.Tensor], leaves: Sequence[Any]
) -> tuple[tuple[int, int], ...]:
    """Say which targets of a call overlap which of its leaves, if they share a storage.

    Raises:
        RuntimeError: a target does so with itself.
    """
    if not _REPEATS.match(op):
        for target in targets:
            check_places(target)
    is_apart = _APART.match(op) is not None
    return tuple(
        (place, i)
        for place, target in enumerate(targets)
        for i in _checked(op, leaves)
        if would_overlap(target, leaves[i], is_apart=is_apart)
    )


def _checked(op: str, leaves: Sequence[Any]) -> Iterator[int]:
    """Give the places of the leaves that PyTorch checks; masks that are indices it has copied."""
    if _FREE.match(op):
        return
    start = 1 if _APART.match(op) else 0
    end = 2 if _NUMBER_LAST.match(op) else len(leaves)
    for i in range(start, end):
        is_copied = start and i < len(leaves) - 1 and leaves[i].dtype in _MASKS
        if is_on_npu(leaves[i]) and not is_copied:
            yield i


def check_places(target: torch.Tensor) -> None:
    """Check that each element of what is written to has a place of its own.

    Raises:
        RuntimeError: it is expanded.
    """
    if torch._debug_has_internal_overlap(target) == _YES:
        what = "more than one element of the written-to tensor refers to a single memory location"
        raise RuntimeError(_UNSUPPORTED.format(what))


def would_overlap(target: torch.Tensor, source: torch.Tensor, *, is_apart: bool = False) -> bool:
    """Say whether two tensors have some bytes in common, if they are of one storage.

    What is all the same, PyTorch allows, unless it `is_apart`; what is not dense, it does not look
    at.

    Source: `at::get_overlap_status`.
    """
    for tensor in (target, source):
        if not tensor.numel() or dense_order(tuple(tensor.shape), tensor.stride()) is None:
            return False
    start, end = _span(target)
    other_start, other_end = _span(source)
    if (start, end) == (other_start, other_end):
        return is_apart or target.stride() != source.stride()
    return start < other_end and other_start < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + tensor.nbytes


def check_overlap(target: torch.Tensor, source: torch.Tensor) -> None:
    """Check that what is written to is all of what is read, or nothing of it.

    Raises:
        RuntimeError: it is a part of it.
    """
    if would_overlap(target, source):
        refuse_shared(target, source)


def refuse_shared(target: torch.Tensor, source: torch.Tensor) -> None:
    """Check that two tensors that would overlap have storages of their own.

    Raises:
        RuntimeError: they share one.
    """
    if storage_id(target) == storage_id(source):
        what = (
            "some elements of the input tensor and the written-to tensor refer to a single memory "
            "location"
        )
        raise RuntimeError(_UNSUPPORTED.format(what))

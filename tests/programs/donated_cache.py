"""Update a cache on "npu" step by step, donated or not; tell what memory it took, and was in."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import torch

import npu_iree

SIZE = 256
NBYTES = 4 * SIZE * SIZE


def step(
    cache: torch.Tensor, row: torch.Tensor, at: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    new = cache.index_copy(0, at, row)
    return new, new.sum(0)


def memory_of(tensor: torch.Tensor) -> Any:
    """Return a tensor's buffer, without reading it."""
    storage: Any = tensor.untyped_storage()
    handle = getattr(storage, "npu_unread", None)
    return (storage.npu_handle if handle is None else handle).hal_view.get_buffer()


def run(options: dict[str, Any], is_read: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    compiled = torch.compile(step, backend="npu_iree", options=options)
    cache = torch.randn(SIZE, SIZE)
    held = cache.to("npu")
    twin, first = held.clone(), cache.clone()
    peaks, places, copies = [], [], []
    for i in range(5):
        row, at = torch.full((1, SIZE), float(i)), torch.tensor([i])
        cache = step(cache, row, at)[0]
        inputs = row.to("npu"), at.to("npu")
        if is_read:
            copies.append((held.clone(), held.cpu()))
        if i < 2:
            gc.collect()  # what others and the first call, which compiles, have left
        before = torch.npu.memory_allocated()
        torch.npu.reset_peak_memory_stats()
        with npu_iree.copy_budget(d2h=0, waits=0):
            held = compiled(held, *inputs)[0]
        peaks.append((torch.npu.max_memory_allocated() - before) // NBYTES)
        places.append(memory_of(held))
    return {
        "peaks": peaks,
        "in place": [a == b for a, b in itertools.pairwise(places)],
        "right": torch.equal(held.cpu(), cache)
        and torch.equal(twin.cpu(), first)
        and all(torch.equal(copy.cpu(), value) for copy, value in copies),
    }


def tell() -> dict[str, Any]:
    """Update it in each way."""
    given: dict[str, Any] = {"donate": ["cache"]}
    runs = {"kept": ({}, False), "donated": (given, False), "read": (given, True)}
    told = {}
    for name, (options, is_read) in runs.items():
        torch._dynamo.reset()
        told[name] = run(options, is_read)
    return told

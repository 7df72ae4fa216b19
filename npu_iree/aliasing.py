"""How the arguments of a call share memory; a graph that writes to them is right for one way only.

AOTAutograd looks at the first call: arguments that overlap become views of one base, at fixed
places. Where sizes are static, neither it nor Dynamo looks again, so that the same function called
with other views of one tensor would read and write the wrong elements.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from npu_iree.frozen import extent, is_lazy_copy, storage_address, storage_id
from npu_iree.torch_device.current import NAME, is_on_npu

# For each argument that overlaps another: its position, the first position in that memory, and
# where in the memory it begins (None where the graph takes that for a variable).
Aliasing: TypeAlias = frozenset[tuple[int, int, int | None]]
_NONE: Aliasing = frozenset()
OTHER_ALIASES = (
    "a graph writes to its arguments, and these overlap in another way than those that it was "
    "compiled for, or one has several elements in the same place (clone one of them, or call "
    "torch._dynamo.reset())"
)


class Aliases:
    """How the arguments that a graph was compiled with share memory, as AOTAutograd sees it.

    It does not see that tensors with storages of their own, e.g. from NumPy, are the same memory.
    """

    def __init__(
        self, inputs: Sequence[Any], has_free_offset: Sequence[bool], written: Collection[int]
    ) -> None:
        """Look at the arguments of the first call.

        Args:
            inputs: the arguments.
            has_free_offset: for each, whether the graph is for any `storage_offset`.
            written: the positions of those that the graph writes to.
        """
        self._positions = [i for i, value in enumerate(inputs) if _has_memory(value)]
        self._written = [i for i in self._positions if i in written]
        self._free = [has_free_offset[i] for i in self._positions]
        tensors = self._tensors(inputs)
        # Of every tensor in every call, weights among them; Dynamo sees to it that they stay on
        # their devices.
        self._place = _place if any(map(is_on_npu, tensors)) else storage_address
        self._expected = self._aliasing(tensors, list(map(storage_id, tensors)))

    @property
    def are_shared(self) -> bool:
        """Whether arguments of the first call overlap."""
        return bool(self._expected)

    def may_not_be_written(self, args: Sequence[Any]) -> bool:
        """Say whether an argument that is written to was made in `inference_mode`, and this is not.

        Eager refuses that, but for what a graph writes when it has gone into that mode itself.
        """
        return not torch.is_inference_mode_enabled() and any(
            args[i].is_inference() for i in self._written
        )

    def are_as_compiled(self, args: Sequence[Any]) -> bool:
        """Say whether the arguments of a call overlap as the graph takes for granted.

        None that is written to may overlap itself: all its elements would be written, each with
        what it alone should be.
        """
        if any(overlaps_itself(args[i]) for i in self._written):
            return False
        tensors = self._tensors(args)
        memories = list(map(self._place, tensors))
        if not self._expected and len(set(memories)) == len(memories):
            return True
        return self._aliasing(tensors, list(map(_memory, tensors))) == self._expected

    def _tensors(self, args: Sequence[Any]) -> list[torch.Tensor]:
        return [args[i] for i in self._positions]

    def _aliasing(self, tensors: Sequence[torch.Tensor], memories: Sequence[int]) -> Aliasing:
        groups: dict[int, list[int]] = defaultdict(list)
        for i, (tensor, memory) in enumerate(zip(tensors, memories, strict=True)):
            if tensor.numel():
                groups[memory].append(i)
        found: Aliasing = _NONE
        for group in groups.values():
            if len(group) > 1:
                members = [tensors[i].detach() for i in group]
                shared = [group[k] for k in compute_overlapping_tensors(members, symbolic=False)]
                places = [
                    None if self._free[i] else int(tensors[i].storage_offset()) for i in shared
                ]
                first = min(shared, default=0)
                found |= {(i, first, place) for i, place in zip(shared, places, strict=True)}
        return found


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Say whether several elements of a tensor may be in the same place."""
    if not torch._debug_has_internal_overlap(tensor):
        return False
    reach = 0  # of the dimensions within this one, in elements
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def near_each_other(tensors: Mapping[int, torch.Tensor]) -> set[int]:
    """Return those of some CPU tensors that may overlap another: each ends where another begins."""
    found: set[int] = set()
    last, reach = -1, 0  # which of those before reaches farthest, and where to
    for (begin, end), i in sorted((extent(t), i) for i, t in tensors.items() if t.numel()):
        if begin < reach:
            found |= {last, i}
        if end > reach:
            last, reach = i, end
    return found


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether a write to one CPU tensor may change the other.

    Of tensors with storages of their own only the extents are compared.
    """
    if storage_address(one) == storage_address(other) and one.dtype == other.dtype:
        if not one.numel() or not other.numel() or _are_interleaved(one, other):
            return False
        pair = [one.detach(), other.detach()]
        return bool(compute_overlapping_tensors(pair, symbolic=False))
    (begin, end), (other_begin, other_end) = extent(one), extent(other)
    return begin < other_end and other_begin < end


def _are_interleaved(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors of one storage are e.g. its even and its odd elements."""
    sizes, strides = (*one.shape, *other.shape), (*one.stride(), *other.stride())
    step = math.gcd(*(n for size, n in zip(sizes, strides, strict=True) if size > 1))
    distance = int(one.storage_offset()) - int(other.storage_offset())
    return step > 1 and distance % step != 0


def _place(tensor: torch.Tensor) -> int:
    """Name the memory that a tensor reads: where it begins, or the storage that has the handle."""
    return storage_id(tensor) if is_on_npu(tensor) else storage_address(tensor)


def _memory(tensor: torch.Tensor) -> int:
    """Name the memory that a tensor writes to: a lazy copy is moved to its own first."""
    return storage_id(tensor) if is_lazy_copy(tensor) else _place(tensor)


def _has_memory(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, FakeTensor)
        and not is_traceable_wrapper_subclass(value)
        and value.layout is torch.strided
        and value.device.type in ("cpu", NAME)
    )

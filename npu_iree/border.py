"""The border of a call: host tensors go in by alias or copy, results come back behind one wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lowering.signature import inverse
from npu_iree.array import DeviceArray
from npu_iree.device import Device
from npu_iree.frozen import (
    Span,
    address_of,
    bytes_at,
    can_freeze,
    end_lazy_copy,
    frozen,
    is_lazy_copy,
    is_same_memory,
    overlapping,
    spans,
    storage_address,
    unversioned,
)
from npu_iree.host_memory import dense_copy, why_not_in_place
from npu_iree.timeline import NOW
from npu_iree.transfers import Transfer, is_watched, record

# Results of a call share a block of memory, and one that is kept keeps that: a loss, or logits, all
# activations. Of a block of so many bytes, the smallest get memory of their own; how large a part
# of all is copied so at the most.
_LARGE_BYTES, _SMALL_PART = 1 << 20, 32


@dataclass(frozen=True)
class Crossing:
    """What is known of a value that crosses.

    Attributes:
        name: of the value.
        order: its dimensions from the slowest to the fastest in the device's memory.
        back: the permutation from there, if it is not the order of the dimensions.
        where: the user's line that made it, if known.
    """

    name: str
    order: tuple[int, ...]
    back: tuple[int, ...] | None
    where: str = ""

    @classmethod
    def of(cls, name: str, order: tuple[int, ...], where: str = "") -> Crossing:
        """Make one from the memory order."""
        is_natural = order == tuple(range(len(order)))
        return cls(name, order, None if is_natural else inverse(order), where)


def put_in_place(
    device: Device,
    tensor: torch.Tensor,
    crossing: Crossing,
    imported: list[torch.Tensor],
    is_given: bool = False,
    is_waited_for: bool = True,
    is_callers: bool = True,
) -> DeviceArray:
    """Give the device a tensor, in place if its memory allows.

    Args:
        device: where to.
        tensor: a CPU tensor.
        crossing: what is known of it.
        imported: takes the host memory that the device was given.
        is_given: the device may write to the memory, too.
        is_waited_for: the call returns when the work that reads it has ended; otherwise, the device
            gets what the tensor holds now, whoever writes to it then.
        is_callers: the tensor is an argument, and not one that the call itself has made.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if is_given and is_lazy_copy(tensor):
        end_lazy_copy(tensor)
    stored = tensor if crossing.back is None else tensor.permute(crossing.order)
    # While the device reads it.
    may_change = not (is_given or is_waited_for or is_lazy_copy(stored))
    problem = why_not_in_place(stored, device.target.alignment_bytes)
    # A NumPy view of an argument writes to it where PyTorch's copy-on-write does not see it.
    if may_change and not problem and (is_callers or not can_freeze(stored)):
        problem = "its memory may be written to while the device reads it"
    if is_watched():
        mode = "staged" if problem else device.crossing_mode
        name, where = crossing.name, crossing.where
        record(Transfer("h2d", mode, tensor.nbytes, name, "the device", where, problem))
    if problem:
        stored = dense_copy(stored)
    elif may_change or is_lazy_copy(stored):
        stored = frozen(stored)
    imported.append(stored)
    view, ready = device.memory.put(stored, device.start_point(), crossing.name, is_given)
    return DeviceArray(device, view, tuple(stored.shape), stored.dtype, ready)


class Import:
    """An input that often comes in the same memory: then the device has a view of it already.

    The view is of an address, and owns nothing. What is at the address in a call is kept alive by
    that call, which waits for the work that reads it; between calls nobody looks.

    Attributes:
        can_stay: whether the device reads the caller's memory, in the order that it is in.
    """

    def __init__(self, device: Device, crossing: Crossing, is_given: bool) -> None:
        self._device = device
        self._crossing = crossing
        self._is_given = is_given
        self.can_stay = device.target.memory == "unified" and crossing.back is None
        self._last = -1
        self._known: Known | None = None

    def put(self, tensor: torch.Tensor, imported: list[torch.Tensor]) -> DeviceArray:
        """Do what `put_in_place` does; nothing at all, if the tensor is where it was before."""
        if (known := self.known(tensor)) is None:
            address = address_of(tensor)
            if self.can_stay and address == self._last and _is_plain(tensor) and tensor.nbytes:
                self._remember(tensor, address)
            self._last = address
        elif not is_watched():
            imported.append(tensor)
            return known.handle
        return put_in_place(self._device, tensor, self._crossing, imported, self._is_given)

    def known(self, tensor: torch.Tensor) -> Known | None:
        """Return what is known of a tensor that is where it was before, else None."""
        known = self._known
        is_there = (
            known is not None
            and storage_address(tensor) == known.storage
            and tensor.storage_offset() == known.offset
            and tensor.shape == known.handle.shape
            and _is_plain(tensor)
        )
        return known if is_there else None

    def _remember(self, tensor: torch.Tensor, address: int) -> None:
        if address % self._device.target.alignment_bytes or not storage_address(tensor):
            return  # without an address are zeros that have no memory
        memory = bytes_at(address, tensor.nbytes, owner=None)
        alias = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        view, ready = self._device.memory.put(alias, NOW, self._crossing.name, self._is_given)
        handle = DeviceArray(self._device, view, tuple(tensor.shape), tensor.dtype, ready)
        self._known = Known(
            storage_address(tensor),
            int(tensor.storage_offset()),
            handle,
            (address, address + tensor.nbytes, -1),
        )


class Known(NamedTuple):
    """Where an input was, and what the device has of that memory.

    Attributes:
        storage: the address of its storage.
        offset: of the tensor in there, in elements.
        handle: of the memory; owns nothing.
        span: its addresses.
    """

    storage: int
    offset: int
    handle: DeviceArray
    span: Span


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's elements are its memory, in order, and nobody copies it lazily."""
    return (
        tensor.is_contiguous()
        and not is_lazy_copy(tensor)
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def fetch(
    device: Device,
    arrays: Sequence[DeviceArray],
    crossings: Sequence[Crossing],
    reader: str,
    imported: list[torch.Tensor],
    kept: Sequence[DeviceArray] = (),
    targets: Sequence[torch.Tensor | None] = (),
) -> list[torch.Tensor]:
    """Bring handles to the host in one batch, behind one wait.

    Args:
        device: where from.
        arrays: the handles.
        crossings: what is known of each.
        reader: who needs them.
        imported: host memory that the device was given, or gave, in this call.
        kept: other results of the call, which the device goes on to use: nobody else gets their
            memory.
        targets: for each handle, the argument that it will be written to, if it will; it may be in
            that memory already.

    Raises:
        DeviceError: the work that makes one of them failed.
        HostCopyError: a `copy_budget` forbids it.
    """
    if is_watched():
        for crossing, array in zip(crossings, arrays, strict=True):
            mode, name, where = device.crossing_mode, crossing.name, crossing.where
            record(Transfer("d2h", mode, array.nbytes, name, reader, where))
        record(Transfer("wait", "wait", 0, ", ".join(c.name for c in crossings), reader))
    is_unified = device.target.memory == "unified"
    # Before the wait, while the device works.
    taken = spans(imported, are_others=True) if is_unified else []
    stored = device.fetch(arrays)
    if is_unified and kept:
        others = device.fetch(kept)
        imported += others
        taken += spans(others, are_others=True)
    if is_unified:
        tensors = land(stored, crossings, reader, taken, targets)
        imported += tensors
        return tensors
    return _in_order(stored, crossings)


def land(
    stored: list[torch.Tensor],
    crossings: Sequence[Crossing],
    reader: str,
    taken: list[Span],
    targets: Sequence[torch.Tensor | None] = (),
) -> list[torch.Tensor]:
    """Make tensors in unified memory the results of a call, each in memory of its own.

    Args:
        stored: what came back, in the order of the device's memory.
        crossings: what is known of each.
        reader: who needs them.
        taken: memory that is others'.
        targets: as for `fetch`.
    """
    tensors = _in_order(stored, crossings)
    for i, target in enumerate(targets):
        if target is not None and is_same_memory(tensors[i], target):
            tensors[i] = target
    own = spans(tensors)
    if targets:
        own = [span for span in own if tensors[span[2]] is not targets[span[2]]]
    # The compiler hands the same buffer out twice where values are equal (`x + 0`, `y.clone()`); in
    # eager they are two tensors. What is the argument that it is to be written to stays.
    apart = dict.fromkeys(
        overlapping(taken + own),
        "its memory is also that of an argument, a state or another result",
    )
    if len(tensors) > 1 and (together := sum([t.nbytes for t in tensors])) > _LARGE_BYTES:
        small = smallest([(end - start, i) for start, end, i in own], together)
        apart |= dict.fromkeys(small, "it would keep the memory of larger results")
    for i, reason in apart.items():
        if is_watched():
            name, where = crossings[i].name, crossings[i].where
            record(Transfer("d2h", "staged", tensors[i].nbytes, name, reader, where, reason))
        tensors[i] = tensors[i].clone()
    return tensors


def smallest(results: Sequence[tuple[int, int]], together: int) -> list[int]:
    """Choose which results of a call get memory of their own: they may outlive larger ones.

    Args:
        results: the size in bytes and the position of those that may.
        together: the bytes of all.
    """
    left, found = together // _SMALL_PART if together > _LARGE_BYTES else 0, []
    for nbytes, i in sorted(results):
        left -= nbytes
        if left < 0:
            break
        found.append(i)
    return found


def write_back(
    device: Device,
    arguments: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    names: Sequence[str],
) -> None:
    """Write to arguments of a call what the graph says, unless the device has done so in place.

    Args:
        device: that of the call.
        arguments: what is written to. Who called us counts their versions.
        values: what is written; they may be, or be views of, arguments as they were.
        names: of the values.
    """
    ahead = [
        (a, v, name)
        for a, v, name in zip(arguments, values, names, strict=True)
        if not is_same_memory(v, a)
    ]
    if not ahead:
        return
    owned = {storage_address(a) for a in arguments}
    fresh = [v.clone() if storage_address(v) in owned else v for _, v, _ in ahead]
    if is_watched() and device.target.memory == "unified":
        for _, value, name in ahead:
            reason = "written to the caller's memory"
            record(Transfer("d2h", "staged", value.nbytes, name, "the caller", "", reason))
    with torch.no_grad():
        _write_all([unversioned(a) for a, _, _ in ahead], fresh)


def _write_all(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Write to each its own, at once where PyTorch does: not to lazy conjugates and negatives."""
    if any(target.is_conj() or target.is_neg() for target in targets):
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
    else:
        torch._foreach_copy_(targets, values)


def _in_order(stored: list[torch.Tensor], crossings: Sequence[Crossing]) -> list[torch.Tensor]:
    """Bring tensors, in their list, into the order of their dimensions; returns it."""
    for i, crossing in enumerate(crossings):
        if crossing.back is not None:
            stored[i] = stored[i].permute(crossing.back)
    return stored

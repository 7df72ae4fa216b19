"""Host memory that stays as it is: copy-on-write, so that a later write shows as a new address.

A version counter does not see `p.data.mul_(2)`, and a data pointer sees no write in place.
PyTorch's copy-on-write does: while we hold a lazy clone of a tensor's storage, the first write
through any alias of that storage moves it to new memory, and the address tells. Reading never
moves it. The clone also keeps the bytes that the device was given, so they cannot change under it.
Source: `torch._lazy_clone`, c10/core/impl/COW.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

# Where a tensor's storage begins; unlike `untyped_storage().data_ptr()`, without ending a
# copy-on-write. This and the next are asked of every input in every call: no Python is around them.
storage_address: Callable[[torch.Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]
# Whether a tensor's memory is copied at the first write.
is_lazy_copy: Callable[[torch.Tensor], bool] = torch._C._is_cow_tensor  # type: ignore[attr-defined]
_offset: Any = torch.Tensor.storage_offset
_version: Any = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]


def storage_id(tensor: torch.Tensor) -> int:
    """Tell a tensor's storage apart from others, on any device."""
    return int(tensor.untyped_storage()._cdata)


def address_of(tensor: torch.Tensor) -> int:
    """Return where a tensor's bytes are; unlike `data_ptr()`, without ending a copy-on-write."""
    return storage_address(tensor) + int(tensor.storage_offset()) * tensor.element_size()


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a CPU tensor's first element begins and its last one ends."""
    begin = address_of(tensor)
    if not tensor.numel():
        return begin, begin
    last = sum(n * (size - 1) for n, size in zip(tensor.stride(), tensor.shape, strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def addresses_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return where the storages of tensors begin, and where in these the tensors do.

    Of every weight in every call: no Python is run for each.
    """
    return list(map(storage_address, tensors)), list(map(_offset, tensors))


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how often PyTorch has counted a write to each tensor; of inference's, it counts none.

    Of every weight in every call: no Python is run for each.
    """
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def end_lazy_copy(tensor: torch.Tensor) -> None:
    """Give a lazy copy memory of its own, to write to without PyTorch."""
    tensor.data_ptr()


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors are the same elements in the same memory; ends no copy-on-write."""
    if one is other:
        return True
    if one.shape != other.shape or address_of(one) != address_of(other):
        return False
    if one.is_conj() != other.is_conj() or one.is_neg() != other.is_neg():
        return False
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return one.dtype == other.dtype and all(size == 1 or a == b for size, a, b in strides)


def unversioned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same tensor to write to without counting a version of it.

    Who writes what AOTAutograd asks for leaves the counting to it: it knows which writes autograd
    may see.
    """
    return tensor if tensor.is_inference() else tensor.data


def can_freeze(tensor: torch.Tensor) -> bool:
    """Say whether every write to this tensor can be noticed.

    It can for memory that PyTorch itself allocated. Memory of others (mapped files, NumPy, shared
    memory) cannot be watched.
    """
    if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
        return False
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    try:
        with unset_fake_temporarily():
            torch._lazy_clone(tensor.detach())
    except RuntimeError:
        return False
    return True


def frozen(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same bytes that stay as they are, whatever happens to `tensor`.

    From now on `tensor` is copied at the first write to it. The result is for reading only; it may
    be handed to DLPack, which would end the copy-on-write of `tensor` itself.

    Raises:
        RuntimeError: PyTorch did not allocate the memory.
    """
    clone = torch._lazy_clone(tensor.detach())
    nbytes = int(clone.untyped_storage().nbytes())
    nbytes -= nbytes % tensor.element_size()  # the storage may be that of other elements
    memory = bytes_at(storage_address(clone), nbytes, owner=clone)
    whole = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
    return whole.as_strided(clone.size(), clone.stride(), clone.storage_offset())


# Addresses, of the first byte and behind the last; and which tensor it is (of others: below 0).
Span = tuple[int, int, int]


def spans(tensors: Sequence[torch.Tensor], *, are_others: bool = False) -> list[Span]:
    """Return where the bytes of dense tensors are, but for empty ones."""
    found: list[Span] = []
    first = -len(tensors) if are_others else 0
    for i, tensor in enumerate(tensors, first):  # of every call: all is written out
        if nbytes := tensor.nbytes:
            start = storage_address(tensor)
            if offset := _offset(tensor):
                start += offset * tensor.element_size()
            found.append((start, start + nbytes, i))
    return found


def overlapping(every: list[Span]) -> list[int]:
    """Find which tensors share memory with others, or with one before them; sorts the spans."""
    found: list[int] = []
    last_end, last = -1, -1
    every.sort()
    for start, end, i in every:
        if start < last_end:
            found.append(max(i, last))
        if end > last_end:
            last_end, last = end, i
    return sorted({i for i in found if i >= 0}) if found else found


def is_apart(tensor: torch.Tensor, taken: Sequence[Span]) -> bool:
    """Say whether a tensor shares no memory with others: what `overlapping` finds, of one.

    Args:
        tensor: dense, with a storage of its own, as DLPack gives them.
        taken: where the others' bytes are.
    """
    start = storage_address(tensor)
    end = start + tensor.nbytes
    for other_start, other_end, _ in taken:  # noqa: SIM110  (a generator takes longer than this)
        if start < other_end and other_start < end:
            return False
    return True


def bytes_at(address: int, nbytes: int, owner: object) -> Any:
    """Return memory as an object with the buffer protocol that keeps `owner` alive."""
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    memory.owner = owner
    return memory

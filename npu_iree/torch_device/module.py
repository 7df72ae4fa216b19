"""`torch.npu`: what programs ask of a device, under the names that PyTorch's other devices use."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from npu_iree.errors import NpuIreeError, OptionError
from npu_iree.torch_device import account
from npu_iree.torch_device.current import CURRENT, FALLBACK, NAME, Fallback, Which
from npu_iree.torch_device.current import device as _device
from npu_iree.torch_device.current import index_of as _index
from npu_iree.torch_device.streams import (
    Event,
    Stream,
    current_stream,
    default_stream,
    set_stream,
    stream,
)

__all__ = [
    "Event",
    "OutOfMemoryError",
    "Stream",
    "current_stream",
    "default_stream",
    "set_stream",
    "stream",
]

_CHOICES = ("host", "error")
OutOfMemoryError = torch.OutOfMemoryError


def is_available() -> bool:
    """Say whether there is a device."""
    return CURRENT.device is not None


def is_initialized() -> bool:
    """Say whether the device is open; it is from its registration on."""
    return CURRENT.device is not None


def init() -> None:
    """Do nothing: the device is open."""


def _lazy_init() -> None:
    """Do nothing: the device is open."""


def _is_in_bad_fork() -> bool:
    return CURRENT.device is not None and CURRENT.device._is_of_parent


def device_count() -> int:
    """Return how many devices there are."""
    return int(is_available())


def current_device() -> int:
    """Return the index of the current device."""
    return 0


def set_device(device: Which) -> None:
    """Check that a device is the one there is."""
    _index(device)


def get_device_name(device: Which = None) -> str:
    """Return the name of the target behind the device."""
    _index(device)
    return _device().target.name


def get_device_capability(device: Which = None) -> tuple[int, int]:
    """Return (0, 0): the capability table of the target says what the device can."""
    _index(device)
    return 0, 0


class device:
    """Make a device current in a block; there is one."""

    def __init__(self, device: Which) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(self, *error: object) -> None:
        """Leave the block."""


class device_of(device):
    """Make the device of a tensor or a storage current in a block; of another kind, none."""

    def __init__(self, holder: torch.Tensor | torch.UntypedStorage) -> None:
        is_here = holder.device.type == NAME
        self.idx = _index(holder.device) if is_here else -1


def can_device_access_peer(device: Which, peer_device: Which) -> bool:
    """Return False: there is one device, which is no peer of its own."""
    _index(device)
    _index(peer_device)
    return False


def is_current_stream_capturing() -> bool:
    """Return False: calls are submitted as they are made, and graphs are what compiles to them."""
    return False


@dataclass(frozen=True)
class Properties:
    """What there is to know of the device: the target's name, and how much memory may be held."""

    name: str
    total_memory: int


def get_device_properties(device: Which = None) -> Properties:
    """Return the device's properties; memory without a limit is 0."""
    _index(device)
    return Properties(_device().target.name, account.ACCOUNT.limit or 0)


def synchronize(device: Which = None) -> None:
    """Wait until everything that was submitted has ended, well or not."""
    _index(device)
    _device().synchronize()


def memory_allocated(device: Which = None) -> int:
    """Return the bytes that handles hold."""
    _index(device)
    return account.ACCOUNT.allocated


def max_memory_allocated(device: Which = None) -> int:
    """Return the most bytes that handles held."""
    _index(device)
    return account.ACCOUNT.peak


def memory_reserved(device: Which = None) -> int:
    """Return the bytes that handles hold, and those that are kept to compute in."""
    _index(device)
    opened = _device()
    free = opened.blocks.nbytes - opened.blocks.lent_bytes
    return account.ACCOUNT.allocated + opened.arenas.nbytes + free


def max_memory_reserved(device: Which = None) -> int:
    """Return the most bytes that handles held, or what is reserved now if that is more."""
    return max(account.ACCOUNT.peak, memory_reserved(device))


def memory_stats(device: Which = None) -> OrderedDict[str, int]:
    """Return what is known of memory, under PyTorch's names."""
    return OrderedDict(
        {
            "allocated_bytes.all.current": memory_allocated(device),
            "allocated_bytes.all.peak": max_memory_allocated(device),
            "reserved_bytes.all.current": memory_reserved(device),
            "reserved_bytes.all.peak": max_memory_reserved(device),
        }
    )


def mem_get_info(device: Which = None) -> tuple[int, int]:
    """Return how many bytes may be taken yet, and how many there are.

    Raises:
        NpuIreeError: there is no limit.
    """
    _index(device)
    limit = account.ACCOUNT.limit
    if limit is None:
        raise NpuIreeError(
            "npu:0 has no limit of memory; torch.npu.set_memory_limit(nbytes) gives it one"
        )
    return max(0, limit - account.ACCOUNT.allocated), limit


def reset_accumulated_memory_stats(device: Which = None) -> None:
    """Do nothing: no number is one of all time."""
    _index(device)


def reset_peak_memory_stats(device: Which = None) -> None:
    """Let `max_memory_allocated` begin anew."""
    _index(device)
    account.ACCOUNT.peak = account.ACCOUNT.allocated


def memory_summary(device: Which = None) -> str:
    """Return a table of what holds memory."""
    _index(device)
    return account.table()


def set_memory_limit(nbytes: int | None) -> None:
    """Let handles hold at most so many bytes (None: any); beyond is `torch.OutOfMemoryError`.

    Raises:
        OptionError: it is no number of bytes.
    """
    if nbytes is not None and (not isinstance(nbytes, int) or nbytes < 0):
        raise OptionError(f"a memory limit is a number of bytes, or None for any, not {nbytes!r}")
    account.ACCOUNT.limit = nbytes


def reset_warnings() -> None:
    """Say again of each op that runs on the host, at its next call, that it does."""
    CURRENT.warned.clear()


def empty_cache() -> None:
    """Give back memory to compute in that no call uses now, and what is kept to be used again."""
    account.forget()
    if CURRENT.device is not None and not _is_in_bad_fork():
        CURRENT.device.arenas.release()
        CURRENT.device.blocks.release()


def ipc_collect() -> None:
    """Do nothing: no memory is shared with other processes."""


def manual_seed(seed: int) -> None:
    """Seed PyTorch's generator: random numbers of the device come from it, as on the CPU."""
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed PyTorch's generator."""
    manual_seed(seed)


def seed() -> int:
    """Seed PyTorch's generator with a random number, and return it."""
    return torch.default_generator.seed()


def seed_all() -> int:
    """Do as `seed`: there is one device."""
    return seed()


def initial_seed() -> int:
    """Return the seed."""
    return torch.default_generator.initial_seed()


def get_rng_state(device: Which = None) -> torch.Tensor:
    """Return the state of PyTorch's generator."""
    _index(device)
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, device: Which = None) -> None:
    """Set the state of PyTorch's generator."""
    _index(device)
    torch.default_generator.set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the state of PyTorch's generator, once: there is one device."""
    return [get_rng_state()]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    """Set the state of PyTorch's generator, as `get_rng_state_all` gave it."""
    (state,) = states
    set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes of `torch.autocast("npu")`."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """Say whether bf16 is there."""
    return True


@contextlib.contextmanager
def fallback(choice: Fallback) -> Iterator[None]:
    """Do as `set_fallback` in a block, in its thread alone, whatever is set outside."""
    token = FALLBACK.set(_checked(choice))
    try:
        yield
    finally:
        FALLBACK.reset(token)


def set_fallback(choice: Fallback) -> None:
    """Say what happens to an op that has no kernel.

    Args:
        choice: `host` runs it as PyTorch's CPU kernel, with one warning; `error` raises
            `npu_iree.UnsupportedOpError`.
    """
    if FALLBACK.get() is None:
        CURRENT.fallback = _checked(choice)
    else:  # until the end of the block
        FALLBACK.set(_checked(choice))


def _checked(choice: Fallback) -> Fallback:
    if choice not in _CHOICES:
        raise OptionError(f"fallback is 'host' or 'error', not {choice!r}")
    return choice


def __getattr__(name: str) -> Any:
    raise AttributeError(f"torch.npu has no {name!r}")

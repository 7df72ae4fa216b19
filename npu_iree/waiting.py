"""Waiting without a blocked thread: `await ready(...)` in asyncio, and `wait_any` outside of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from iree.runtime import _binding as hal
from torch.utils import _pytree as pytree

from npu_iree.array import DeviceArray
from npu_iree.device import Device
from npu_iree.errors import ArgumentError, DeviceTimeoutError
from npu_iree.timeline import after_all
from npu_iree.torch_device.current import is_on_npu
from npu_iree.torch_device.storage import held_by
from npu_iree.transfers import Transfer, is_watched, record

# IREE's bridge to asyncio ends with the first failure that it is told of, and tells nobody: who
# waits looks for himself now and then.
_LOOK_AGAIN_S = 0.05


async def ready(tree: Any) -> Any:
    """Wait, in asyncio, until the bytes of every handle exist; other tasks go on meanwhile.

    Args:
        tree: a tensor on "npu", a `DeviceArray`, or a pytree of such (and of anything else).

    Returns:
        `tree`.

    Raises:
        DeviceError: the work that makes one of them failed.
    """
    arrays = _arrays(tree)
    ahead = [a for a in arrays if not a.ready.reached]
    if not ahead:
        return tree
    if is_watched():
        names = ", ".join(a.ready.work.name for a in ahead)
        record(Transfer("wait", "wait", 0, names, "asyncio"))
    with contextlib.suppress(RuntimeError):  # a failure, which the handles tell better
        semaphore = after_all(ahead[0].device.hal, [a.ready for a in ahead])
        async with _Bridge(ahead[0].device) as bridge:
            done = asyncio.ensure_future(bridge.on_semaphore(semaphore, 1, True))
            while not (done.done() or _is_over(ahead)):
                await asyncio.wait([done], timeout=_LOOK_AGAIN_S)
    for array in sorted(ahead, key=lambda a: not a.ready.has_failed()):
        array.wait()  # of one that has failed, at once
    return tree


def wait_any(trees: Sequence[Any], timeout_s: float | None = None) -> int:
    """Wait until the bytes of one of several trees exist, or the work that makes them failed.

    Args:
        trees: as for `ready`.
        timeout_s: seconds to wait at most; None: for ever.

    Returns:
        The place of the first that is done.

    Raises:
        DeviceError: its work failed.
        DeviceTimeoutError: none is done yet.
        ArgumentError: there is no tree.
        RuntimeError: called in asyncio; there, use `asyncio.wait` on `ready`.
    """
    if not trees:
        raise ArgumentError("wait_any takes one tree at least: of none, nothing will ever be done")
    for i, tree in enumerate(trees):
        if all(array.is_ready() for array in _arrays(tree)):
            return i
    return asyncio.run(_first(trees, timeout_s))


async def _first(trees: Sequence[Any], timeout_s: float | None) -> int:
    tasks = [asyncio.ensure_future(ready(tree)) for tree in trees]
    done, others = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    if not done:
        raise DeviceTimeoutError(f"none of {len(trees)} has ended after {timeout_s} s")
    first = min(tasks.index(task) for task in done)
    tasks[first].result()
    return first


class _Bridge:
    """IREE's bridge of a device to the running loop: one for all who wait, while somebody does."""

    _open: dict[tuple[int, int], tuple[Any, int]] = {}  # noqa: RUF012

    def __init__(self, device: Device) -> None:
        self._device = device

    async def __aenter__(self) -> Any:
        loop = asyncio.get_running_loop()
        self._key = id(loop), id(self._device)
        bridge, users = self._open.get(self._key, (None, 0))
        bridge = bridge or hal.HalDeviceLoopBridge(self._device.hal, loop)
        self._open[self._key] = bridge, users + 1
        return bridge

    async def __aexit__(self, *error: object) -> None:
        bridge, users = self._open.pop(self._key)
        if users > 1:
            self._open[self._key] = bridge, users - 1
        else:
            bridge.stop()


def _is_over(arrays: Sequence[DeviceArray]) -> bool:
    """Say whether the bytes of all handles exist, or those of one never will."""
    points = [array.ready for array in arrays]
    return all(p.look() for p in points) or any(p.has_failed() for p in points)


def _arrays(tree: Any) -> list[DeviceArray]:
    found = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, DeviceArray):
            found.append(leaf)
        elif is_on_npu(leaf):
            handle = held_by(leaf.untyped_storage())
            found += [handle] if handle is not None else []
    return found

"""The weights that a graph's executables have bound: once, and again when the user changes one."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch

from lowering.plan import Plan
from npu_iree.array import DeviceArray
from npu_iree.device import Device
from npu_iree.executable import Executable
from npu_iree.frozen import address_of, addresses_of, frozen, versions_of
from npu_iree.host_memory import check_memory, dense_copy, why_not_in_place
from npu_iree.transfers import Transfer, is_watched, record

log = logging.getLogger(__name__)
_UNBOUND, _UNWATCHED = -1, -2  # in the place of an address
_NOTHING = torch.empty(0, device="cpu")
_UNWATCHED_WEIGHT = (
    "the weight %s now lies in memory that PyTorch did not allocate (a mapped file, NumPy, shared "
    "memory), where nobody sees a write: it is copied in each call. To have it read in place, "
    "compile the model after such a change, or give it a clone()."
)


class Weights:
    """What a runner's executables have bound: at the first call, then as it changes.

    Attributes:
        are_any: whether there is any weight at all.
        positions: of the arguments that are weights.
        lock: is held from a `refresh` to the last submission of what reads the weights: two models
            may share a graph, each with weights of its own, and be called by two threads.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        executables: dict[str, Executable],
        constants: dict[str, torch.Tensor],
    ) -> None:
        self._device = device
        self.lock = threading.RLock()
        position = {name: i for i, name in enumerate(plan.inputs)}
        self._uses = {
            name: [
                WeightUse(
                    n.name, bound, spec.order, position.get(n.name, -1), constants.get(n.name)
                )
                for n, bound, spec in zip(
                    region.parameters,
                    region.parameter_names,
                    region.signature.parameters,
                    strict=True,
                )
            ]
            for name, region in plan.regions.items()
            if region.parameters
        }
        self.are_any = bool(self._uses)
        self._executables = executables
        self._every = [*itertools.chain.from_iterable(self._uses.values())]
        self.positions = [use.position for use in self._every if use.constant is None]
        self._seen: tuple[list[int], ...] | None = None

    @property
    def seen(self) -> object:
        """What was bound last: another object after each change."""
        return self._seen

    def are_current(self, args: Sequence[Any]) -> bool:
        """Say whether what is bound is what the arguments of a call hold."""
        return self._look_at(args) == self._seen

    def are_lost(self) -> bool:
        """Say whether to bind one has failed."""
        return any(self._executables[region].has_lost_weights for region in self._uses)

    def refresh(self, args: Sequence[Any]) -> None:
        """Bind the weights that are not what was bound, or no longer. The caller holds the lock."""
        seen = self._look_at(args)
        if seen == self._seen and not self.are_lost():
            return
        self._seen = None
        for region, uses in self._uses.items():
            self._renew(self._executables[region], uses, args)
        if all(use.address != _UNWATCHED for use in self._every):
            self._seen = seen

    def unbind(self) -> None:
        """Let go of all that is bound, while no call is under way."""
        self._seen = None
        for use in self._every:
            use.forget()
        for region in self._uses:
            self._executables[region].unload()

    def _look_at(self, args: Sequence[Any]) -> tuple[list[int], ...]:
        """Return what tells of a write: addresses, and versions.

        A write that was going on in another thread when a weight was bound is still in the memory
        that is bound; it ends with another version.
        """
        weights = [args[i] for i in self.positions]
        return *addresses_of(weights), versions_of(weights)

    def bound(self, region: str) -> list[torch.Tensor]:
        """Return what a region has bound, in the order of its parameters."""
        return [use.stored for use in self._uses.get(region, ())]

    def _renew(
        self, executable: Executable, uses: Sequence[WeightUse], args: Sequence[Any]
    ) -> None:
        changed = [use for use in uses if not use.is_current(args)]
        is_first = any(not use.is_bound for use in uses)
        try:
            for use in changed:
                use.bind(args)
            self._give(executable, uses, changed, is_first)
        except BaseException:
            for use in changed:  # what the device has is unknown: the next call binds all anew
                use.forget()
            raise

    def _give(
        self,
        executable: Executable,
        uses: Sequence[WeightUse],
        changed: Sequence[WeightUse],
        is_first: bool,
    ) -> None:
        """Give the device the weights that have changed, or all of them."""
        names = {use.parameter for use in changed}
        are_all = is_first or executable.has_lost_weights or len(changed) == len(uses)
        if are_all or not executable.can_rebind(names):
            reason = "bound once" if is_first else "it has changed"
            memories = {}
            for use in uses:
                weight = self._hand_over(use, executable, reason)
                memories[use.parameter] = self._device.memory.parameter(weight)
                use.array = None
            executable.load(memories)
            return
        needed = executable.needed_with(names)
        for use in uses:
            if use.parameter in names or (use.parameter in needed and use.array is None):
                self._put(use, executable)
        arrays = {use.parameter: use.array for use in uses if use.array is not None}
        executable.rebind(arrays, names)
        for use in changed:
            if use.parameter not in executable.partners:
                use.array = None

    def _put(self, use: WeightUse, executable: Executable) -> None:
        """Put a weight where what is made of it is made anew."""
        stored = self._hand_over(use, executable, "it has changed")
        view, ready = self._device.memory.put(stored, self._device.start_point(), use.name)
        shape = tuple(stored.shape)
        use.array = DeviceArray(self._device, view, shape, stored.dtype, ready)

    def _hand_over(self, use: WeightUse, executable: Executable, reason: str) -> torch.Tensor:
        """Return the bytes to give to the device, and enter them into the ledger."""
        tensor = use.stored
        problem = why_not_in_place(tensor, self._device.target.alignment_bytes)
        if is_watched():
            mode = "staged" if problem else self._device.crossing_mode
            owner = executable.artifact.name
            record(Transfer("h2d", mode, tensor.nbytes, use.name, owner, "", reason))
        return dense_copy(tensor) if problem else tensor


class WeightUse:
    """One parameter of one region: which argument or constant it is, and what is bound now.

    Attributes:
        name: what the user would call it.
        parameter: the name that the region gives it.
        position: of the argument that it is.
        constant: what it is, if it is no argument.
        address: of what is bound.
        stored: what is bound, in the order that the region wants.
        array: the same on the device, if it was needed there when another changed.
    """

    def __init__(
        self,
        name: str,
        parameter: str,
        order: Sequence[int],
        position: int,
        constant: torch.Tensor | None,
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.position = position
        self.constant = constant
        self._order = tuple(order)
        self._versions = [-1]
        self.address = _UNBOUND
        self.stored = _NOTHING
        self.array: DeviceArray | None = None

    @property
    def is_bound(self) -> bool:
        """Whether there is a value at all."""
        return self.address != _UNBOUND

    def is_current(self, args: Sequence[Any]) -> bool:
        """Say whether what is bound is what the arguments of this call hold."""
        weight = self._weight(args)
        return address_of(weight) == self.address and versions_of([weight]) == self._versions

    def bind(self, args: Sequence[Any]) -> None:
        """Freeze what the arguments of this call hold, in the order that the region wants.

        Memory that PyTorch did not allocate cannot be frozen: it is copied, in each call.
        """
        weight = self._weight(args)
        check_memory(weight, self.name)
        self._versions = versions_of([weight])  # before the bytes, which somebody may be writing
        try:
            kept = frozen(weight)
        except RuntimeError:
            kept = weight.detach().clone()
            if self.address != _UNWATCHED:
                log.warning(_UNWATCHED_WEIGHT, self.name)
            self.address = _UNWATCHED
        else:
            self.address = address_of(kept)  # somebody may write to the weight meanwhile
        self.stored = kept.permute(self._order)

    def forget(self) -> None:
        """Let nothing be bound."""
        self.address = _UNBOUND
        self.stored, self.array = _NOTHING, None

    def _weight(self, args: Sequence[Any]) -> torch.Tensor:
        weight: torch.Tensor = args[self.position] if self.constant is None else self.constant
        return weight

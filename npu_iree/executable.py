"""A loaded artifact: its parameters bound, its calls submitted without waiting."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from iree.runtime import _binding as hal

from lowering.abi import MADE, PARAMETER_SCOPE, REBINDING, SWAP, Rebinding, bind_function
from lowering.artifact import Artifact
from lowering.errors import first_line
from npu_iree.array import DeviceArray
from npu_iree.device import Device
from npu_iree.errors import DeviceError
from npu_iree.function import Function
from npu_iree.lending import Lender
from npu_iree.parameter_index import parameter_index
from npu_iree.timeline import Timepoint, Work, joined, new_fence, submitted, wait_all

_INSTANCE = hal.VmInstance()
_NOTED = 16  # calls, after which those that have ended are forgotten


@dataclass(frozen=True)
class Lane:
    """A HAL device that calls go to, and the module as it is loaded there."""

    device: Any
    context: Any


_UNLOADED = Lane(None, None)


class Executable:
    """An artifact on a device, its parameters bound.

    Thread-safe: submissions are serialized; executions are not, but for those on calling threads.

    Attributes:
        artifact: what was loaded.
        functions: its entry points, by name.
        has_lost_weights: whether to bind one has failed: all are to be bound anew.
    """

    def __init__(self, device: Device, artifact: Artifact) -> None:
        self.artifact = artifact
        self._device = device
        self._lock = threading.Lock()
        self._module = hal.VmModule.copy_buffer(_INSTANCE, artifact.vmfb)
        self._queue = _UNLOADED
        self._inline: Lane | None = None  # loaded at the first small call
        self._bound: list[Timepoint] = []
        self._calls: list[Timepoint] = []  # that may be under way, if weights can be rebound
        self.has_lost_weights = False
        self._lender = Lender(device, self._module)
        made = self._module.lookup_function(MADE)
        self._rebinding = Rebinding.read(made.reflection[REBINDING]) if made else Rebinding()
        self._memories: list[Any] = []  # in which lies what is made of parameters
        self.functions = {name: Function(self, name) for name in artifact.entries}
        has_parameters = any(entry.signature.parameters for entry in artifact.entries.values())
        self._can_inline = device.inline is not None and not has_parameters  # or hold them twice
        self._stays_here = False
        if not has_parameters:
            self.load(None)

    def stay_here(self) -> None:
        """Have all calls run on the calling thread, which waits for what lies ahead of them.

        So no parameters are held twice. Right where all calls are small, and waited for at once.
        It comes before the first values; without parameters, whose small calls may run here anyway,
        or without a device for that thread, nothing changes.
        """
        self._stays_here = not self._can_inline and self._device.inline is not None

    def load(self, parameters: Mapping[str, Any] | None) -> None:
        """Give the parameters their first values.

        IREE packs them for the code that reads them. Calls under way keep what they had.

        Args:
            parameters: their bytes by name, or None (see `npu_iree.parameter_index`). Nobody writes
                to these any more.

        Raises:
            DeviceError: IREE refused the module or a parameter.
        """
        self._device.refuse_child()
        modules = []
        if parameters is not None:
            provider = parameter_index(parameters).create_provider(scope=PARAMETER_SCOPE)
            modules.append(hal.create_io_parameters_module(_INSTANCE, provider))
        queue = self._loaded(self._device.inline if self._stays_here else self._device.hal, modules)
        with self._lock:
            self._queue, self._memories = queue, []
            self._inline = queue if self._stays_here else None
            self._lender.begin(queue.context)
            self._bound, self._calls, self.has_lost_weights = [], [], False

    def unload(self) -> None:
        """Let go of the parameters, while nobody submits a call; those under way keep theirs."""
        with self._lock:
            self._queue, self._memories, self._inline = _UNLOADED, [], None
            self._bound, self._calls = [], []
            self._lender.begin(None)

    def _loaded(self, device: Any, modules: Sequence[Any] = ()) -> Lane:
        hal_module = hal.create_hal_module(_INSTANCE, device)
        try:
            context = hal.VmContext(_INSTANCE, [hal_module, *modules, self._module])
        except (RuntimeError, ValueError) as error:
            target = self._device.target
            cause = (
                f"{target.name!r} cannot load it: {first_line(error)}\n"
                "If that speaks of its code, see that the target's flags, and the tools they name, "
                f"make code for the driver {target.driver}."
            )
            raise DeviceError(self.artifact.name, (), cause) from error
        return Lane(device, context)

    def _lane(self, points: list[Timepoint], is_small: bool) -> Lane:
        """Return where a call goes: small ones to the calling thread, if nothing lies ahead.

        Args:
            points: what the call waits for; those that are found to be reached are taken out.
            is_small: of the call.
        """
        if self._stays_here:
            wait_all(points)
            return self._queue
        if not is_small or not self._can_inline:
            return self._queue
        if points:
            points[:] = [p for p in points if not p.look()]
            if points:
                return self._queue
        if self._inline is None:
            with self._lock:
                self._inline = self._inline or self._loaded(self._device.inline)
        return self._inline

    def can_rebind(self, names: Set[str]) -> bool:
        """Say whether parameters can be bound anew without loading all of them again."""
        return self._rebinding.parameters.issuperset(names)

    def needed_with(self, names: Set[str]) -> set[str]:
        """Return which parameters `rebind` reads if these have changed: some make one thing."""
        return set(names).union(*(one.parameters for one in self._rebinding.made_of(names)))

    @property
    def partners(self) -> frozenset[str]:
        """The parameters that something is made of together with others."""
        return self._rebinding.partners

    def rebind(self, weights: Mapping[str, DeviceArray], changed: Set[str]) -> None:
        """Give parameters new values; later calls see them, and no other weight moves.

        What is made of them is written where it lies, when the calls under way have ended.

        Args:
            weights: by name, what `needed_with` says.
            changed: the names of those that are new.
        """
        bound = [weights[name].ready for name in changed]
        if self._stays_here:
            wait_all([array.ready for array in weights.values()])
        with self._lock:
            under_way = self._under_way()
            for one in self._rebinding.made_of(changed):
                arrays = [weights[name] for name in one.parameters]
                fence, ahead = joined([*(array.ready for array in arrays), *under_way])
                signal = new_fence(self._queue.device)
                inputs = hal.VmVariantList(len(arrays) + 5)
                for array in arrays:
                    inputs.push_ref(array.hal_view)
                inputs.push_ref(self._memory(one.memory))
                inputs.push_int(one.offset)
                inputs.push_int(one.nbytes)
                inputs.push_ref(fence)
                inputs.push_ref(signal)
                function = self._module.lookup_function(bind_function(one.function))
                self._queue.context.invoke(function, inputs, hal.VmVariantList(0))
                work = Work(f"bind {', '.join(one.parameters)} of {self.artifact.name}")
                read = [p for p in ahead if p not in under_way]  # whose failures are its own
                bound.append(submitted(Timepoint(signal, work, read)))
            for which, name in enumerate(self._rebinding.swapped):
                if name in changed:
                    swapped = hal.VmVariantList(2)
                    swapped.push_ref(weights[name].hal_view.get_buffer())
                    swapped.push_int(which)
                    swap = self._module.lookup_function(SWAP)
                    self._queue.context.invoke(swap, swapped, hal.VmVariantList(0))
            self._bound = [*(p for p in self._bound if not p.look()), *bound]

    def _under_way(self) -> list[Timepoint]:
        """Return what may read or write weights, and has not ended.

        What has failed is left out: work that waited for it would fail, too.
        """
        self._calls = [p for p in self._calls if not p.look() and not p.has_failed()]
        return [*self._calls, *(p for p in self._bound if not p.look() and not p.has_failed())]

    def begin(self, inputs: Any, points: list[Timepoint], signal: Any) -> Sequence[Timepoint]:
        """Give a call its fences; returns what may lie ahead of it. The caller holds the lock.

        Args:
            inputs: IREE's list of the arguments, which gets the fences.
            points: what the call waits for; what has been bound since is added.
            signal: tells that it has ended.
        """
        if self._bound:
            self._bound = [p for p in self._bound if not p.look()]
            points += [p for p in self._bound if p not in points]
        fence, ahead = joined(points)
        inputs.push_ref(fence)
        inputs.push_ref(signal)
        return ahead

    def note(self, signal: Any, work: Work) -> None:
        """Keep in mind what reads weights that may be written to. The caller holds the lock."""
        if self._rebinding.made:
            self._calls.append(Timepoint(signal, work))
            if len(self._calls) % _NOTED == 0:
                self._under_way()

    def _memory(self, number: int) -> Any:
        if not self._memories:
            memories = hal.VmVariantList(1)
            made = self._module.lookup_function(MADE)
            self._queue.context.invoke(made, hal.VmVariantList(0), memories)
            self._memories = [
                memories.get_as_object(i, hal.HalBuffer) for i in range(memories.size)
            ]
        return self._memories[number]

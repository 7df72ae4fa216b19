"""A loaded artifact: its parameters bound, its calls submitted without waiting."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from iree.runtime import _binding as hal

from lowering.abi import (
    ENTRY,
    MADE,
    PARAMETER_SCOPE,
    REBINDING,
    SWAP,
    Rebinding,
    bind_function,
)
from lowering.artifact import Artifact
from lowering.dtypes import DTYPES
from lowering.signature import TensorSpec
from npu_iree.arenas import Arena
from npu_iree.array import DeviceArray
from npu_iree.device import Device
from npu_iree.errors import DeviceError
from npu_iree.failed_check import FailedCheck
from npu_iree.lending import Lender
from npu_iree.parameter_index import parameter_index
from npu_iree.timeline import (
    NO_WAIT,
    Timepoint,
    Work,
    are_observed,
    joined,
    new_fence,
    submitted,
)

_INSTANCE = hal.VmInstance()
_List: Any = hal.VmVariantList
_View: Any = hal.HalBufferView
# Up to this effort a call runs on the calling thread. At the limit that takes 5 to 50 us, about as
# long as a thread takes to wake (on idle virtual CPUs, two of them: 25 to 60 us of each call).
INLINE_EFFORT = 1 << 17
_NOTED = 16  # calls, after which those that have ended are forgotten


@dataclass(frozen=True)
class _Lane:
    """A HAL device that calls go to, and the module as it is loaded there."""

    device: Any
    context: Any


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
        self._queue: _Lane
        self._inline: _Lane | None = None  # loaded at the first small call
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
        if not has_parameters:
            self.load(None)

    def load(self, parameters: Mapping[str, Any] | None) -> None:
        """Give the parameters their first values.

        IREE packs them for the code that reads them. Calls under way keep what they had.

        Args:
            parameters: their bytes by name, or None (see `npu_iree.parameter_index`). Nobody writes
                to these any more.

        Raises:
            RuntimeError: IREE refused the module or a parameter.
        """
        self._device.start_point()  # not in a forked child
        modules = []
        if parameters is not None:
            provider = parameter_index(parameters).create_provider(scope=PARAMETER_SCOPE)
            modules.append(hal.create_io_parameters_module(_INSTANCE, provider))
        queue = self._loaded(self._device.hal, modules)
        with self._lock:
            self._queue, self._memories = queue, []
            self._lender.begin(queue.context)
            self._bound, self._calls, self.has_lost_weights = [], [], False

    def _loaded(self, device: Any, modules: Sequence[Any] = ()) -> _Lane:
        hal_module = hal.create_hal_module(_INSTANCE, device)
        return _Lane(device, hal.VmContext(_INSTANCE, [hal_module, *modules, self._module]))

    def _lane(self, points: list[Timepoint], is_small: bool) -> _Lane:
        """Return where a call goes: small ones to the calling thread, if nothing lies ahead.

        Args:
            points: what the call waits for; those that are found to be reached are taken out.
            is_small: of the call.
        """
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
        with self._lock:
            under_way = self._under_way()
            for one in self._rebinding.made_of(changed):
                arrays = [weights[name] for name in one.parameters]
                fence, ahead = joined([*(array.ready for array in arrays), *under_way])
                signal = new_fence(self._device.hal)
                inputs = hal.VmVariantList(len(arrays) + 5)
                for array in arrays:
                    inputs.push_ref(array._view)
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
                    swapped.push_ref(weights[name]._view.get_buffer())
                    swapped.push_int(which)
                    swap = self._module.lookup_function(SWAP)
                    self._queue.context.invoke(swap, swapped, hal.VmVariantList(0))
            self._bound = [*(p for p in self._bound if not p.look()), *bound]

    def _under_way(self) -> list[Timepoint]:
        """Return what reads or writes weights, and has not ended; what has failed does neither."""
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


class Function:
    """One entry point of an executable: call it with handles, get handles.

    Attributes:
        work: what a call is, for whoever sees it fail.
        declaration: how the module itself declares it.
    """

    def __init__(self, executable: Executable, name: str) -> None:
        entry = executable.artifact.entries[name]
        ops = tuple(f"{op} at {line}" if line else op for op, line in entry.ops)
        function = executable._module.lookup_function(name)
        if function is None:
            raise ValueError(f"the module has no function {name[:80]!r}")
        self.work = Work(executable.artifact.name if name == ENTRY else name, ops)
        self.declaration: str = function.reflection.get("iree.abi.declaration", "")
        self._executable = executable
        self._name = name
        self._device = executable._device
        self._function = function
        self._outputs = [(DTYPES[s.dtype], _static(s)) for s in entry.signature.outputs]
        self._arity = len(entry.signature.inputs) + 2  # and both fences
        self._signature = entry.signature

    def __call__(
        self, *args: DeviceArray | int | float | bool, is_small: bool = False
    ) -> list[DeviceArray]:
        """Submit a call; returns handles at once. The device itself waits for the arguments.

        A small call whose arguments are there is run before this returns.

        Args:
            args: handles of this device and numbers, as the signature says.
            is_small: whether it may run on the calling thread if all arguments are there.

        Raises:
            DeviceError: the work that makes an argument has failed already, or IREE refuses the
                call.
        """
        inputs = self.arguments()
        points: list[Timepoint] = []
        for arg in args:
            if isinstance(arg, DeviceArray):
                inputs.push_ref(arg._view)
                if not (ready := arg.ready)._reached:
                    points.append(ready)
            else:
                push_number(inputs, arg)
        points += self.ahead()  # a failure is told by the first that failed
        views, ready = self.submit(inputs, points, is_small)
        arrays = []
        for view, (dtype, shape) in zip(views, self._outputs, strict=True):
            shape_now = tuple(view.shape) if shape is None else shape
            arrays.append(DeviceArray(self._device, view, shape_now, dtype, ready))
        return arrays

    def arguments(self) -> Any:
        """Return IREE's list for the arguments of a call, which `submit` takes."""
        return _List(self._arity)

    def ahead(self) -> list[Timepoint]:
        """Return what every call waits for, its arguments aside.

        Raises:
            DeviceError: to bind a weight has failed.
        """
        bound, device = self._executable._bound, self._device
        try:
            points = [p for p in bound if not p.is_reached()] if bound else []
        except DeviceError:
            self._executable.has_lost_weights = True
            raise
        if not device.is_free:
            points.append(device.start_point())
        return points

    def submit(
        self, inputs: Any, points: list[Timepoint], is_small: bool
    ) -> tuple[list[Any], Timepoint]:
        """Submit a call; returns the results' buffer views, and when their bytes exist.

        Args:
            inputs: IREE's list of the arguments, which is used up.
            points: what the device waits for.
            is_small: as for `__call__`.

        Raises:
            DeviceError: as `__call__`.
        """
        executable = self._executable
        lane = executable._lane(points, is_small)
        signal = new_fence(lane.device)
        count = len(self._outputs)
        has_checks = bool(self._signature.checks)
        results = _List(count + has_checks)
        arena: Arena | None = None
        try:
            with executable._lock:
                ahead = executable.begin(inputs, points, signal)
                if lane is executable._inline:
                    lane.context.invoke(self._function, inputs, results)
                else:
                    lane = executable._queue  # which another thread may have loaded anew
                    call = self._name, self._function, inputs, results
                    arena = executable._lender.invoke(*call, points)
                executable.note(signal, self.work)
        except RuntimeError as error:
            for point in points:  # what has failed already fails this, and tells better why
                point.is_reached()
            raise DeviceError(self.work.name, self.work.ops, str(error)) from error
        finding = None
        if has_checks:
            failed = results.get_as_object(count, _View)
            finding = FailedCheck(self._device, failed, self.work, self._signature)
        ready = Timepoint(signal, self.work, ahead, finding)
        if arena is not None:
            arena.end_with(ready)
        if lane is not executable._queue:
            ready.look()
        views = [results.get_as_object(i, _View) for i in range(count)]
        submitted(ready)
        if not ready._reached:
            self._device.track(ready, sum([view.byte_length for view in views]))
        return views, ready

    def run_here(self, inputs: Any) -> list[Any] | None:
        """Run a small call on the calling thread; returns the results' buffer views.

        It is `submit` without what most calls do not need, which takes as long as the rest: here
        nothing lies ahead (what runs here has no weights, and so none that are being bound), nobody
        looks on, and no value is checked. Where that is not so, None is returned, and nothing has
        been done.

        Args:
            inputs: IREE's list of the arguments, which is used up.

        Raises:
            DeviceError: as `__call__`, and the work itself failed.
        """
        executable = self._executable
        if (
            (lane := executable._inline) is None
            or not self._device.is_free
            or self._signature.checks
            or are_observed()
        ):
            return None
        signal, results = new_fence(lane.device), _List(len(self._outputs))
        inputs.push_ref(NO_WAIT)
        inputs.push_ref(signal)
        try:
            with executable._lock:
                lane.context.invoke(self._function, inputs, results)
        except RuntimeError as error:
            raise DeviceError(self.work.name, self.work.ops, str(error)) from error
        Timepoint(signal, self.work).wait()  # it has ended; this tells of a failure
        return [results.get_as_object(i, _View) for i in range(len(self._outputs))]


def push_number(inputs: Any, number: float) -> None:
    """Append a number to IREE's list of the arguments of a call."""
    if isinstance(number, float):
        inputs.push_float(number)
    else:
        inputs.push_int(number)


def _static(spec: TensorSpec) -> tuple[int, ...] | None:
    """Return the stored shape if no size can change, else None."""
    sizes = [spec.shape[d] for d in spec.order]
    return tuple(s for s in sizes if isinstance(s, int)) if _all_int(sizes) else None


def _all_int(sizes: Sequence[int | str]) -> bool:
    return all(isinstance(s, int) for s in sizes)

"""One entry point of an executable: its calls are submitted without waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from iree.runtime import _binding as hal

from lowering.abi import ENTRY
from lowering.dtypes import DTYPES
from lowering.signature import TensorSpec
from npu_iree.arenas import Arena
from npu_iree.array import DeviceArray
from npu_iree.errors import DeviceError
from npu_iree.failed_check import FailedCheck
from npu_iree.timeline import NO_WAIT, Timepoint, Work, are_observed, new_fence, submitted

if TYPE_CHECKING:
    from npu_iree.executable import Executable, Lane

_List: Any = hal.VmVariantList
_View: Any = hal.HalBufferView
# Up to this effort a call runs on the calling thread. At the limit that takes 5 to 50 us, about as
# long as a thread takes to wake (on idle virtual CPUs, two of them: 25 to 60 us of each call).
INLINE_EFFORT = 1 << 17


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
                inputs.push_ref(arg.hal_view)
                if not (ready := arg.ready).reached:
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
        results = _List(len(self._outputs) + 1)
        arena: Arena | None = None
        try:
            ahead, arena = self._invoke(lane, inputs, points, signal, results)
            ready = Timepoint(signal, self.work, ahead, self._finding(results))
            if arena is not None:
                arena.end_with(ready)
                arena = None
            if lane is executable._inline:
                ready.look()
            views = [results.get_as_object(i, _View) for i in range(len(self._outputs))]
            submitted(ready)
            if not ready.is_settled():
                self._device.track(ready, sum([view.byte_length for view in views]))
        except BaseException:
            if results.size:  # it is under way, and nobody is told what to wait for
                with contextlib.suppress(RuntimeError):
                    signal.wait()
            if arena is not None:
                self._device.arenas.give_up(arena)
            raise
        return views, ready

    def _invoke(
        self, lane: Lane, inputs: Any, points: list[Timepoint], signal: Any, results: Any
    ) -> tuple[Sequence[Timepoint], Arena | None]:
        """Submit a call to a lane; returns what may lie ahead of it, and what it computes in."""
        executable = self._executable
        arena: Arena | None = None
        try:
            with executable._lock:
                if lane is executable._inline or executable._stays_here:
                    ahead = executable.begin(inputs, points, signal)
                    lane.context.invoke(self._function, inputs, results)
                else:  # to that which is loaded now, maybe by another thread
                    arena = executable._lender.lend(self._name, points)
                    ahead = executable.begin(inputs, points, signal)
                    executable._lender.invoke(self._name, self._function, inputs, results)
                executable.note(signal, self.work)
        except BaseException as error:
            if arena is not None:  # the call is refused, or under way: nobody gets to know in what
                self._device.arenas.give_up(arena)
            if not isinstance(error, RuntimeError):
                raise
            for point in points:  # what has failed already fails this, and tells better why
                point.is_reached()
            raise DeviceError(self.work.name, self.work.ops, str(error)) from error
        return ahead, arena

    def _finding(self, results: Any) -> FailedCheck | None:
        """Return what tells of a wrong value, if the call looks for any: its last result."""
        if not self._signature.checks:
            return None
        failed = results.get_as_object(len(self._outputs), _View)
        return FailedCheck(self._device, failed, self._signature)

    def run_here(self, inputs: Any) -> list[Any] | None:
        """Run a small call on the calling thread; returns the results' buffer views.

        It is `submit` without what most calls do not need, which takes as long as the rest: here
        nothing lies ahead, no weight has just been bound anew, nobody looks on, and no value is
        checked. Where that is not so, None is returned, and nothing has been done.

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
            or executable._bound
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
    """Append a number to IREE's list of the arguments of a call.

    Raises:
        OverflowError: it is a whole number that 64 bits do not hold; eager says the same of most.
    """
    if isinstance(number, float):
        inputs.push_float(number)
        return
    try:
        inputs.push_int(number)
    except TypeError as error:
        raise OverflowError(f"{number} is too big for the 64 bits of an argument") from error


def _static(spec: TensorSpec) -> tuple[int, ...] | None:
    """Return the stored shape if no size can change, else None."""
    sizes = [spec.shape[d] for d in spec.order]
    return tuple(s for s in sizes if isinstance(s, int)) if _all_int(sizes) else None


def _all_int(sizes: Sequence[int | str]) -> bool:
    return all(isinstance(s, int) for s in sizes)

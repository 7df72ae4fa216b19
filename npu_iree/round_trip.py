"""A region there and back as one step: what is put, invoked and gathered with nothing in between.

So it is in most graphs, and what a call costs that computes little is the number of steps that
Python takes. Nothing is decided here: where anything is out of the ordinary (an input that has
moved, somebody who watches), the single steps run.

Whether a weight has changed is found out while the device works: what lies in memory about several
hundred of them has left the CPU's caches since the last call. Where one has, all is done again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowering.plan import Free, Gather, Invoke, Plan, Put
from npu_iree.border import Crossing, Import, Known, land
from npu_iree.device import Device
from npu_iree.errors import DeviceError
from npu_iree.frozen import is_apart
from npu_iree.function import Function, push_number
from npu_iree.timeline import NOW, Timepoint
from npu_iree.transfers import is_watched
from npu_iree.weights import Weights

# Takes a call's places: each value's bytes on the host, or its number; each value's handle; and
# host memory that the device was given in place.
RunStep = Callable[[list[Any], list[Any], list[torch.Tensor]], None]


def find_round_trip(plan: Plan) -> slice | None:
    """Find the steps of a plan's only region, from its put to its gather, if nothing is between."""
    device_steps = [i for i, s in enumerate(plan.steps) if isinstance(s, Put | Invoke | Gather)]
    if plan.edges or len(device_steps) != 3:
        return None
    first, _, last = device_steps
    match [step for step in plan.steps[first : last + 1] if not isinstance(step, Free)]:
        case [Put(), Invoke(_, _, made), Gather(gathered)] if set(made) == set(gathered):
            return slice(first, last + 1)
    return None


class RoundTrip:
    """One region, called with inputs that are where they were in the call before.

    Args:
        device: that of the region.
        function: the region's.
        is_small: as for a call of it.
        sources: the place of each of its inputs, and how it gets to the device (None: a number).
        results: the place, dtype and crossing of each of its results, in order.
        targets: the places of the arguments that these will be written to, if any will.
        reader: who needs the results.
        weights: what is bound, if the single steps see to that, too.
        can_repeat: whether the region leaves its inputs as they are.
        one_by_one: the single steps.
    """

    def __init__(
        self,
        device: Device,
        function: Function,
        is_small: bool,
        sources: Sequence[tuple[int, Import | None]],
        results: Sequence[tuple[int, torch.dtype, Crossing]],
        targets: Sequence[int | None],
        reader: str,
        weights: Weights | None,
        can_repeat: bool,
        one_by_one: Sequence[RunStep],
    ) -> None:
        self._device = device
        self._function = function
        self._is_small = is_small
        self._sources = sources
        self._results, self._dtypes, self._crossings = zip(*results, strict=True)
        self._targets = targets if any(i is not None for i in targets) else ()
        self._is_lone = len(results) == 1 and not self._targets and self._crossings[0].back is None
        self._reader = reader
        self._weights = weights
        self._can_repeat = can_repeat
        self._one_by_one = one_by_one
        # Where the inputs of a call were, and which results were in the memory of their targets.
        self._last: tuple[list[Known], list[bool]] = [], []

    def run(self, host: list[Any], handles: list[Any], imported: list[torch.Tensor]) -> None:
        """Run the region (a `RunStep`).

        Raises:
            DeviceError: the region failed.
            HostCopyError: a `copy_budget` forbids the wait.
        """
        if is_watched() or not self._run(host):
            for step in self._one_by_one:
                step(host, handles, imported)

    def _run(self, host: list[Any]) -> bool:
        """Run all as one; says whether it did, and the results are there."""
        function, weights = self._function, self._weights
        seen = None if weights is None else weights.seen
        if weights is not None and (seen is None or weights.are_lost()):
            return False  # what nobody can watch is bound anew in each call
        inputs = function.arguments()
        taken: list[Known] = []
        for i, source in self._sources:
            value = host[i]
            if source is None:
                if not value:  # maybe a size: a region with empty tensors is not run on the device
                    return False
                push_number(inputs, value)
            elif value is not None and (known := source.known(value)) is not None:
                inputs.push_ref(known.handle.hal_view)
                taken.append(known)
            else:
                return False
        if (views := self._call(host, inputs, seen)) is None:
            return False
        for i, tensor in zip(self._results, self._land(host, views, taken), strict=True):
            host[i] = tensor
        return True

    def _call(self, host: list[Any], inputs: Any, seen: object) -> list[Any] | None:
        """Run the call, or submit it and wait; None: a weight has changed since `seen`."""
        weights = self._weights
        if weights is None or self._can_repeat:
            views, ready = self._submit(inputs)
        else:
            with weights.lock:
                if not weights.are_current(host):
                    return None
                views, ready = self._submit(inputs)
        is_right = False
        try:
            is_right = (
                weights is None
                or not self._can_repeat
                or (weights.are_current(host) and weights.seen is seen)
            )
        finally:
            if not ready.reached:
                # A failure with weights that have changed is none of this call's.
                with contextlib.suppress(*(() if is_right else (DeviceError,))):
                    _wait(ready)
        return views if is_right else None

    def _submit(self, inputs: Any) -> tuple[list[Any], Timepoint]:
        function = self._function
        if self._is_small and (views := function.run_here(inputs)) is not None:
            return views, NOW
        return function.submit(inputs, function.ahead(), self._is_small)

    def _land(
        self, host: list[Any], views: Sequence[Any], taken: list[Known]
    ) -> list[torch.Tensor]:
        """Make tensors of what came back.

        Which results the module puts in the place of an input is settled when it is compiled: where
        the inputs are those of the call before, they are there again, and nobody looks.
        """
        crossings, spans = self._crossings, [known.span for known in taken]
        as_tensor = self._device.as_tensor
        if self._is_lone:
            tensor = as_tensor(views[0], self._dtypes[0])
            if is_apart(tensor, spans):
                return [tensor]
        if not self._targets:
            return land(list(map(as_tensor, views, self._dtypes)), crossings, self._reader, spans)
        targets = [None if i is None else host[i] for i in self._targets]
        last, there = self._last
        if last != taken:
            there = [False] * len(views)
        stored: list[Any] = [
            target if is_there else as_tensor(view, dtype)
            for is_there, target, view, dtype in zip(
                there, targets, views, self._dtypes, strict=True
            )
        ]
        landed = land(stored, crossings, self._reader, spans, targets)
        self._last = (
            taken,
            [
                tensor is target and crossing.back is None
                for tensor, target, crossing in zip(landed, targets, crossings, strict=True)
            ],
        )
        return landed


def _wait(ready: Timepoint) -> None:
    """Wait for work that reads the caller's memory, even if somebody interrupts that."""
    try:
        ready.wait()
    except BaseException:
        with contextlib.suppress(DeviceError):
            ready.wait()
        raise

"""A region there and back as one step: what is put, invoked and gathered with nothing in between.

So it is in most graphs, and what a call costs that computes little is the number of steps that
Python takes. Nothing is decided here: where anything is out of the ordinary (an input that has
moved, somebody who watches or holds the device), the single steps run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from iree.runtime import _binding as hal

from lowering.plan import Free, Gather, Invoke, Plan, Put
from npu_iree.border import Crossing, Import, land
from npu_iree.device import Device
from npu_iree.errors import DeviceError
from npu_iree.executable import Function, push_number
from npu_iree.frozen import Span
from npu_iree.transfers import is_watched

# Takes a call's places: each value's bytes on the host, or its number; each value's handle; and
# host memory that the device was given in place.
RunStep = Callable[[list[Any], list[Any], list[torch.Tensor]], None]


def find_round_trip(plan: Plan) -> slice | None:
    """Find the steps of a plan's only region, from its put to its gather, if nothing is between."""
    device_steps = [i for i, s in enumerate(plan.steps) if isinstance(s, Put | Invoke | Gather)]
    if plan.edges or len(device_steps) != 3:
        return None
    first, *_, last = device_steps
    between = plan.steps[first : last + 1]
    kinds = [type(step) for step in between if not isinstance(step, Free)]
    return slice(first, last + 1) if kinds == [Put, Invoke, Gather] else None


class RoundTrip:
    """One region, called with inputs that are where they were in the call before.

    Args:
        device: that of the region.
        function: the region's.
        sources: the place of each of its inputs, and how it gets to the device (None: a number).
        results: the place of each of its results, in order.
        crossings: what is known of these.
        targets: the places of the arguments that these will be written to, if any will.
        reader: who needs the results.
        is_small: see `Function.submit`.
        one_by_one: the single steps.
    """

    def __init__(
        self,
        device: Device,
        function: Function,
        sources: Sequence[tuple[int, Import | None]],
        results: Sequence[int],
        crossings: Sequence[Crossing],
        targets: Sequence[int | None],
        reader: str,
        is_small: bool,
        one_by_one: Sequence[RunStep],
    ) -> None:
        self._device = device
        self._function = function
        self._sources = sources
        self._results = results
        self._dtypes = [dtype for dtype, _ in function._outputs]
        self._crossings = crossings
        self._targets = targets if any(i is not None for i in targets) else ()
        self._reader = reader
        self._is_small = is_small
        self._one_by_one = one_by_one

    def run(self, host: list[Any], handles: list[Any], imported: list[torch.Tensor]) -> None:
        """Run the region (a `RunStep`).

        Raises:
            DeviceError: the region failed.
            HostCopyError: a `copy_budget` forbids the wait.
        """
        if is_watched() or not self._run(host, imported):
            for step in self._one_by_one:
                step(host, handles, imported)

    def _run(self, host: list[Any], imported: list[torch.Tensor]) -> bool:
        """Run all as one, or nothing; says whether it did."""
        function = self._function
        inputs = hal.VmVariantList(len(self._sources) + 2)
        tensors: list[torch.Tensor] = []
        taken: list[Span] = []
        for i, source in self._sources:
            value = host[i]
            if source is None:
                if not value:  # maybe a size: a region with empty tensors is not run on the device
                    return False
                push_number(inputs, value)
            elif (known := source.known(value)) is not None:
                inputs.push_ref(known.view)
                taken.append(known.span)
                tensors.append(value)
            else:
                return False
        views, ready = function.submit(inputs, function.ahead(), self._is_small)
        imported += tensors
        try:
            ready.wait()
        except BaseException:  # an interrupt: the device still reads the caller's memory
            with contextlib.suppress(DeviceError):
                ready.wait()
            raise
        stored = list(map(self._device.as_tensor, views, self._dtypes))
        targets = [None if i is None else host[i] for i in self._targets] if self._targets else ()
        landed = land(stored, self._crossings, self._reader, imported, taken, targets)
        for i, tensor in zip(self._results, landed, strict=True):
            host[i] = tensor
        return True

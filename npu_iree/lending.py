"""What the calls of one executable are lent: memory to compute in, and memory for their results."""

from __future__ import annotations

from typing import Any

from iree.runtime import _binding as hal

from lowering.abi import LEND, LEND_RESULTS, LENT_BYTES, TAKE_BACK, TAKE_RESULTS_BACK, read_sizes
from npu_iree.arenas import Arena
from npu_iree.blocks import Block
from npu_iree.device import Device
from npu_iree.timeline import Timepoint

_MOST_ARENAS = 2  # of an executable: a call may be submitted while another is under way


class Lender:
    """Lends a module memory of a device, call by call. Whoever uses it holds a lock."""

    def __init__(self, device: Device, module: Any) -> None:
        self._device = device
        self._functions = {
            name: module.lookup_function(name)
            for name in (LEND, TAKE_BACK, LEND_RESULTS, TAKE_RESULTS_BACK)
        }
        self._arena_bytes = self._sizes(LEND)
        self._result_bytes = self._sizes(LEND_RESULTS)
        self._context: Any = None
        self._lent: Arena | None = None
        self._arenas: list[Arena] = []
        self._blocks = frozenset[Block]()

    def _sizes(self, lend: str) -> dict[str, int]:
        function = self._functions[lend]
        return {} if function is None else read_sizes(function.reflection[LENT_BYTES])

    def begin(self, context: Any) -> None:
        """Lend to a module that was loaded anew, and has nothing."""
        self._context, self._lent = context, None

    def lend(self, name: str, points: list[Timepoint]) -> Arena | None:
        """Lend the next call of an entry point what it computes in.

        Args:
            name: of the entry point.
            points: what the call waits for; the call that has used the arena last may be added.

        Returns:
            What the caller has end with the call, or gives up if there is none.
        """
        if not (nbytes := self._arena_bytes.get(name, 0)):
            return None
        pool, before = self._device.arenas, self._lent
        if before is not None and before.nbytes >= nbytes and pool.lend_again(before, points):
            return before
        self._arenas = [arena for arena in self._arenas if arena in pool]
        arena = pool.lend(nbytes, points, may_be_new=len(self._arenas) < _MOST_ARENAS)
        if arena is not None:
            self._call(LEND, arena.buffer)
            self._arenas = [arena, *(a for a in self._arenas if a is not arena)][:_MOST_ARENAS]
        elif before is not None:
            self._call(TAKE_BACK)
        self._lent = arena
        return arena

    def invoke(self, name: str, entry: Any, inputs: Any, results: Any) -> None:
        """Submit a call of an entry point, with memory for its results.

        Args:
            name: of the entry point.
            entry: its function in the module.
            inputs: IREE's list of the arguments.
            results: IREE's list for the results.

        Raises:
            RuntimeError: IREE has refused the call.
        """
        nbytes = self._result_bytes.get(name, 0)
        try:
            if nbytes:
                self._lend_results(nbytes)
            self._context.invoke(entry, inputs, results)
        except BaseException:
            if nbytes:
                self._call(TAKE_RESULTS_BACK)
            raise

    def _lend_results(self, nbytes: int) -> None:
        pool = self._device.blocks
        if (lent := pool.lend(nbytes)) is not None:
            block, buffer = lent
            self._call(LEND_RESULTS, buffer)
            if block not in self._blocks:
                self._blocks = frozenset([block, *(b for b in self._blocks if b in pool)])

    def _call(self, function: str, *buffers: Any) -> None:
        arguments = hal.VmVariantList(len(buffers))
        for buffer in buffers:
            arguments.push_ref(buffer)
        self._context.invoke(self._functions[function], arguments, hal.VmVariantList(0))

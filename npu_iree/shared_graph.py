"""One graph of several models, such as the blocks of a network: a runner for each one's weights."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from typing import Any

from npu_iree.runner import Runner

_Memory = weakref.ref[Any]  # a storage
_Place = tuple[int, int]  # the storage's id, and the offset in it
_MOST_MODELS = 256  # whose weights are bound at once; the one that ran longest ago goes


def for_each_model(runner: Runner) -> Runner | SharedGraph:
    """Give what runs a graph for each model that has it: a runner for the weights of each."""
    position = runner.first_weight
    return runner if position is None else SharedGraph(runner, position)


class SharedGraph:
    """Runs a graph by the runner that has bound the weights of the call.

    Dynamo compiles modules of one class once (`for block in model: block.compile()`), and passes
    their weights. A model is known by where its first weight lies: as long as that memory is there,
    what is bound for it stays; when it is gone, so is that, and its runner is for the next that
    comes. (A weak reference to the tensor itself would keep it from `torch.utils.swap_tensors`.)

    Attributes:
        plan: what is run.
    """

    def __init__(self, runner: Runner, position: int) -> None:
        """Begin with one runner.

        Args:
            runner: what has been loaded; others are like it.
            position: of the argument that is the first weight.
        """
        self._spare: list[Runner] = [runner]
        self._first = runner
        self._position = position
        self._models: OrderedDict[_Place, tuple[_Memory, Runner]] = OrderedDict()
        self._lock = threading.RLock()  # memory may go while it is held
        self._last: tuple[_Memory | None, int, Runner] = None, 0, runner
        self.plan = runner.plan

    def __call__(self, *args: Any) -> list[Any]:
        """Run the graph once, as `Runner` does."""
        return self.run([*args])

    def run(self, args: list[Any]) -> list[Any]:
        """Run the graph once; takes the arguments out of the list."""
        weight = args[self._position]
        memory = weight.untyped_storage()  # held: meanwhile, nobody lets go of what is bound
        offset = weight.storage_offset()
        last, at, runner = self._last
        if last is None or last() is not memory or at != offset:
            runner = self._find(memory, offset)
        return runner.run(args)

    def _find(self, memory: Any, offset: int) -> Runner:
        key = id(memory), offset
        with self._lock:
            found = self._models.get(key)
            if found is None or found[0]() is not memory:
                if len(self._models) == _MOST_MODELS:
                    self._spare.append(self._models.popitem(last=False)[1][1])
                runner = self._spare.pop() if self._spare else self._first.again()
                forget = functools.partial(_forget, weakref.ref(self), key)
                found = self._models[key] = weakref.ref(memory, forget), runner
            self._models.move_to_end(key)
            self._last = found[0], offset, found[1]
            return found[1]

    def _forget(self, key: _Place, gone: _Memory) -> None:
        """Let the runner of a model that is gone be the next one's; one is enough."""
        with self._lock:
            found = self._models.get(key)
            if found is not None and found[0] is gone:
                runner = self._models.pop(key)[1]
                runner.unbind()
                self._spare[:] = [runner]


def _forget(shared: weakref.ref[SharedGraph], key: _Place, gone: _Memory) -> None:
    """Tell a graph that a model is gone; the models hold no graph."""
    if (graph := shared()) is not None:
        graph._forget(key, gone)

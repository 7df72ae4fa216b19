"""Worker processes that may crash or hang: each task ends, in a result or in how it died."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, Literal, TypeVar

from lowering.worker import die_with_parent

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

# Compilers leak a few MB a task: a worker is replaced after so many.
TASKS_A_WORKER = 200
_SECONDS_TO_START = 120  # most that a worker may take: it imports PyTorch, beside others
# What a task calls to say what it is about to do, so that its death can be told by that; or with
# what would be its result if it died now.
Progress = Callable[[Any], None]


@dataclass(frozen=True)
class Died:
    """A worker that did not come back.

    Attributes:
        during: what the task had said last that it was about to do.
        how: `SIGSEGV` and the like, `exit code 3`, `no answer in 20 s`, or what it raised.
        kind: which of these it is.
        so_far: the result that the task had said last, if it did.
    """

    during: str
    how: str
    kind: Literal["crash", "hang", "error"] = "crash"
    so_far: Any = None


class _Worker(Generic[_Task, _Result]):
    def __init__(
        self, function: Callable[[_Task, Progress], _Result], make_ready: Callable[[], None]
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, function, make_ready)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.task: _Task | None = None
        self.before: _Task | None = None  # what it has answered last
        self.has_begun = False
        self.given = 0
        self.during = ""
        self.so_far: Any = None
        self.deadline = 0.0

    def give(self, task: _Task, limit_s: float) -> None:
        self.task, self.during, self.so_far, self.has_begun = task, "", None, False
        self.deadline = time.monotonic() + _SECONDS_TO_START + limit_s
        self.given += 1
        with contextlib.suppress(ConnectionError):  # it has died since: `answer` finds out
            self.pipe.send(task)

    def answer(self, limit_s: float) -> _Result | Died | None:
        """Return the result or the death of the task, or None if it is still at work."""
        try:
            while self.pipe.poll():
                kind, value = self.pipe.recv()
                if kind == "result":
                    return value  # type: ignore[no-any-return]
                if kind == "raised":
                    return Died(self.during, value, "error", self.so_far)
                if kind == "started":
                    self.has_begun = True
                    self.deadline = time.monotonic() + limit_s
                elif isinstance(value, str):
                    self.during = value
                else:
                    self.so_far = value
        except (EOFError, ConnectionError):
            self.process.join()
            return Died(self.during, _exit_name(self.process.exitcode), so_far=self.so_far)
        if time.monotonic() < self.deadline:
            return None
        self.stop()
        return Died(self.during, f"no answer in {limit_s:.0f} s", "hang", self.so_far)

    def stop(self) -> None:
        """End the process: one at rest ends by itself, so that it leaves no semaphores behind."""
        self.pipe.close()
        if self.task is None:
            self.process.join(timeout=10)
        self.process.kill()
        self.process.join()


def nothing() -> None:
    """Make nothing ready."""


def run_all(
    function: Callable[[_Task, Progress], _Result],
    tasks: Iterable[_Task],
    *,
    workers: int,
    limit_s: float,
    make_ready: Callable[[], None] = nothing,
) -> Iterator[tuple[_Task, _Result | Died]]:
    """Run tasks in worker processes, and give each with what came of it, as they end.

    A worker may die of a task that it has answered, as it is given the next: then that one's death
    is given, too, and counts, and the next goes to another worker.

    Args:
        function: a module-level function of a task.
        tasks: what to do; taken one by one.
        workers: how many processes.
        limit_s: seconds that one task may take, from when a worker has it, before that is killed.
        make_ready: a module-level function that a worker calls first: no task's time.
    """
    queue, pool = iter(tasks), list[_Worker[_Task, _Result]]()
    try:
        while True:
            busy = [w for w in pool if w.task is not None]
            while len(busy) < workers and (task := next(queue, None)) is not None:
                if not (idle := [w for w in pool if w.task is None]):
                    pool.append(_Worker(function, make_ready))
                worker = (idle or pool)[-1]
                worker.give(task, limit_s)
                busy.append(worker)
            if not busy:
                return
            wait([w.pipe for w in busy], timeout=0.5)
            for worker in busy:
                if (answer := worker.answer(limit_s)) is None:
                    continue
                task = worker.task
                if isinstance(answer, Died) and not worker.has_begun and worker.given > 1:
                    queue, task = itertools.chain([task], queue), worker.before  # type: ignore[list-item]
                    answer = replace(answer, during="after its answer")
                yield task, answer  # type: ignore[misc]
                worker.before, worker.task = task, None
                if isinstance(answer, Died) or worker.given == TASKS_A_WORKER:
                    worker.stop()
                    pool.remove(worker)
    finally:
        for worker in pool:
            worker.stop()


def _serve(
    pipe: Connection,
    function: Callable[[_Task, Progress], _Result],
    make_ready: Callable[[], None],
) -> None:
    _end_with_the_run()
    quiet = os.open(os.devnull, os.O_WRONLY)  # compilers print their stacks when they crash
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    make_ready()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("started", None))
            pipe.send(("result", function(task, lambda said: pipe.send(("progress", said)))))
        except Exception as error:  # a task may fail in any way; the next one must not notice
            pipe.send(("raised", f"{type(error).__name__}: {error}"))
            raise


def _end_with_the_run() -> None:
    """See that no worker that is stuck in native code outlives the process that runs them.

    A worker's parent is the fork server, which goes on while anybody holds its pipe: the workers
    would.
    """
    die_with_parent()
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]


def _exit_name(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"

"""The compile service: a pool of warm worker processes that stages run in, with limits.

Whatever happens in a worker, the caller sees a product or a `StageError`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from lowering.cpu import CPU_FLAG
from lowering.errors import CancelledError, FlagError, StageError, WorkerStartError
from lowering.stages import CompileOptions
from lowering.worker import OUT_OF_MEMORY
from lowering.worker_process import (
    WorkerCrashError,
    WorkerKilledError,
    WorkerProcess,
    WorkerTimeoutError,
)

_CPUS = re.compile(r"^Unknown CPU for .*\nList of accepted CPUs: (.*)", re.MULTILINE)
# What native code says when it aborts because it got no memory, also for a thread.
_NO_MEMORY = re.compile("bad_alloc|out of memory|allocate memory|Resource temporarily unavailable")
_KILLS = 2  # so often the worker of a request may be killed
_STARTS = 3  # so often a worker may end before it is ready, until there is no more trying


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one stage may take.

    Attributes:
        time_s: seconds.
        memory_bytes: address space of a worker.
    """

    time_s: float = 600.0
    memory_bytes: int = 8 << 30


FAULT_KINDS = ("abort", "segv", "kill", "hang", "memory", "error")


@dataclass(frozen=True)
class Fault:
    """A failure to commit in a worker in the place of a stage, for tests.

    Attributes:
        stage: name of the stage.
        kind: one of `FAULT_KINDS`.
        op: only for regions that hold this op, e.g. `aten.tanh.default`.
    """

    stage: str
    kind: str
    op: str


def _with_limit(text: str, limits: Limits) -> str:
    """Add which option there is where memory may have run out: native code aborts then.

    It aborts for other reasons, too, but not without a word of them.
    """
    first, *rest = text.splitlines() or [""]
    is_abort = "SIGABRT" in first and (not rest or _NO_MEMORY.search(text))
    if first == OUT_OF_MEMORY or "SIGKILL" in first or is_abort:
        first += f"; it may use {limits.memory_bytes} bytes (option compile_memory_limit_bytes)"
    return "\n".join([first, *rest])


def _folder() -> str:
    """Return the folder that flags name files from; empty if it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return ""


class CompileService:
    """A pool of workers. Thread-safe: as many requests run at a time as there are workers.

    A forked process has workers of its own; those of its parent do not notice it.

    Attributes:
        size: how many workers there may be.
        started: how many were ever started.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._all: set[WorkerProcess] = set()
        self._begin()
        _SERVICES.add(self)

    def _begin(self) -> None:
        self.started = 0
        self._starter = _Starter()
        self._idle: queue.LifoQueue[WorkerProcess | None] = queue.LifoQueue()
        for _ in range(self.size):
            self._idle.put(None)
        self._lock = threading.Lock()

    def begin_after_fork(self) -> None:
        """Begin without workers: threads and locks of the parent are of no use to its child."""
        workers, self._all = self._all, set()
        for worker in workers:
            worker.disown()
        self._begin()

    def start_ahead(self) -> None:
        """Start a first worker: it imports the compilers while its request is still made up."""
        if not self._all:
            with contextlib.suppress(WorkerStartError), self._worker():  # the request will tell
                pass

    def run(
        self,
        stage: str,
        text: str,
        options: CompileOptions,
        limits: Limits,
        fault: str | None = None,
        cancelled: threading.Event | None = None,
    ) -> bytes:
        """Run a stage in a worker.

        Args:
            stage: its name.
            text: its input.
            options: what it may know beside its input.
            limits: what it may take.
            fault: a failure to commit instead, for tests.
            cancelled: set, before `close`, by who waits for the product no more.

        Raises:
            CancelledError: the service was closed meanwhile, or `cancelled` is set.
            FlagError: the compiler does not take a flag, or knows no such CPU.
            StageError: the stage failed, or the worker crashed, hung or ran out of memory.
            WorkerStartError: no worker comes up.
        """
        head = {
            "stage": stage,
            "options": options.to_json(),
            "folder": _folder(),
            "memory_limit_bytes": limits.memory_bytes,
            "fault": fault,
        }
        try:
            reply, product = self._ask(head, text.encode(), limits.time_s, cancelled)
        except WorkerTimeoutError as error:
            text = f"{error} (option compile_time_limit_s)"
            raise StageError(stage, text, timed_out=True) from error
        except WorkerCrashError as error:
            if accepted := _CPUS.search(str(error)):
                asked = [flag for flag in options.flags if flag.startswith(CPU_FLAG)]
                text = f"{' '.join(asked)}: there is no such CPU. There are: {accepted[1]}"
                raise FlagError(stage, text, options.flags) from error
            was_killed = isinstance(error, WorkerKilledError)
            text = _with_limit(str(error), limits)
            raise StageError(stage, text, was_killed=was_killed) from error
        if "flags" in reply:
            raise FlagError(stage, reply["error"], reply["flags"])
        if "error" in reply:
            error_lines = _with_limit(reply["error"], limits).splitlines()
            others = [line for line in reply["stderr"] if line not in error_lines]
            raise StageError(stage, "\n".join([*error_lines, *others]))
        return product

    def _ask(
        self, head: dict[str, Any], body: bytes, time_s: float, cancelled: threading.Event | None
    ) -> tuple[Any, bytes]:
        """Send a request; what may not be the program's fault gets another try, by a fresh worker.

        A used worker may have been dying already; and one that was killed is nobody's fault, but
        for who is killed twice.
        """
        starts = kills = 0
        while True:
            was_used = False
            try:
                with self._worker() as worker, self._cancelled_if_closed(worker, cancelled):
                    was_used = worker.served > 0
                    worker.await_ready()
                    return worker.request(head, body, time_s)
            except WorkerStartError:
                starts += 1
                if starts == _STARTS:
                    raise
            except WorkerTimeoutError:
                raise
            except WorkerKilledError:
                kills += 1
                if kills == _KILLS:
                    raise
            except WorkerCrashError:
                if not was_used:
                    raise

    @contextlib.contextmanager
    def _cancelled_if_closed(
        self, worker: WorkerProcess, cancelled: threading.Event | None
    ) -> Iterator[None]:
        """Tell a worker that `close` has ended from one that died.

        `close` ends the workers that it knows; one that it does not was lent after it, and then
        `cancelled` is set already.
        """
        if cancelled is not None and cancelled.is_set():
            raise CancelledError
        try:
            yield
        except (WorkerCrashError, WorkerStartError) as error:
            with self._lock:
                if worker not in self._all:
                    raise CancelledError from error
            raise

    @contextlib.contextmanager
    def _worker(self) -> Iterator[WorkerProcess]:
        """Lend a worker; one that is left in the middle of a request is ended."""
        worker = self._idle.get()
        try:
            if worker is not None and not worker.is_fit():  # or it died, or was ended, while idle
                self._end(worker)
                worker = None
            if worker is None:
                worker = self._starter.start()
                with self._lock:
                    self.started += 1
                    self._all.add(worker)
            yield worker
        except BaseException:
            if worker is not None:
                self._end(worker)
            self._idle.put(None)
            raise
        self._idle.put(worker)

    def _end(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.end()

    def close(self) -> None:
        """End all workers; a request under way is cancelled. A later one starts new workers.

        Their pipes are closed by those who hold them: a thread may be reading.
        """
        with self._lock:
            workers, self._all = self._all, set()
        for worker in workers:
            worker.kill()


class _Starter:
    """Starts workers on a thread that stays: Linux kills a child when its parent *thread* ends.

    The thread is a daemon. One of `concurrent.futures` is waited for when the process ends, and in
    vain where Ctrl-C came before the executor knew the thread that it had just started.
    """

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[Future[WorkerProcess]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> WorkerProcess:
        """Return a new worker, which may not be ready yet.

        Raises:
            WorkerStartError: there can be no more processes.
        """
        if self._thread is None or not self._thread.is_alive():  # a second one would do no harm
            self._thread = threading.Thread(
                target=self._serve, name="lowering-starter", daemon=True
            )
            self._thread.start()
        worker: Future[WorkerProcess] = Future()
        self._wanted.put(worker)
        return worker.result()

    def _serve(self) -> None:
        while True:
            worker = self._wanted.get()
            try:
                worker.set_result(_start_worker())
            except BaseException as error:
                worker.set_exception(error)
            del worker  # one that nobody waits for any more ends


_SERVICES: weakref.WeakSet[CompileService] = weakref.WeakSet()
_STARTING = threading.Lock()


def _start_worker() -> WorkerProcess:
    try:
        with _STARTING:
            return WorkerProcess()
    except OSError as error:  # no more processes, descriptors or memory
        raise WorkerStartError(f"no compile worker can be started: {error}") from error


def _after_fork() -> None:
    _STARTING.release()
    for service in _SERVICES:
        service.begin_after_fork()


# A child that is forked while the pipes of a worker are made would hold their far ends, too: the
# parent would not see the end of that worker. So there is no fork meanwhile.
os.register_at_fork(
    before=_STARTING.acquire, after_in_parent=_STARTING.release, after_in_child=_after_fork
)

"""The compile service: a pool of warm worker processes that stages run in, with limits.

Whatever happens in a worker, the caller sees a product or a `StageError`.
"""

from __future__ import annotations

import contextlib
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, cast

from lowering.errors import CancelledError, StageError
from lowering.stages import CompileOptions
from lowering.worker import read_frame, write_frame

_SIGNALS = {s.value: s.name for s in signal.Signals}
_STDERR_TAIL_BYTES = 4000
_REQUESTS_PER_WORKER = 300  # compilers leak: a process that has served this many is replaced


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one stage may take.

    Attributes:
        time_s: seconds.
        memory_bytes: address space of a worker.
    """

    time_s: float = 600.0
    memory_bytes: int = 8 << 30


@dataclass(frozen=True)
class Fault:
    """A failure to commit in a worker in the place of a stage, for tests.

    Attributes:
        stage: name of the stage.
        kind: `abort`, `segv`, `kill`, `hang`, `memory` or `error`.
        op: only for regions that hold this op, e.g. `aten.tanh.default`.
    """

    stage: str
    kind: str
    op: str


class WorkerCrashError(Exception):
    """A worker ended, or had to be ended, before it answered."""


class WorkerTimeoutError(WorkerCrashError):
    """A worker had to be ended because its time was over."""


class _Worker:
    """One worker process."""

    def __init__(self) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as we do
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lowering.worker"],  # -P: not from the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C is for the process that asked
        )
        self.served = 0
        self._requests = cast(BinaryIO, self._process.stdin)
        self._replies = cast(BinaryIO, self._process.stdout)

    def request(self, head: dict[str, Any], body: bytes, time_s: float) -> tuple[Any, bytes]:
        """Send a request and wait for its answer.

        Raises:
            WorkerCrashError: there is no answer, or not in time; the worker is gone.
        """
        self.served += 1
        self._stderr.seek(0)
        self._stderr.truncate()
        try:
            write_frame(self._requests, head, body)
            if not select.select([self._replies], [], [], time_s)[0]:
                raise WorkerTimeoutError(f"it did not end within {time_s:g} s")
            return read_frame(self._replies)
        except (EOFError, BrokenPipeError) as error:
            raise WorkerCrashError(self._last_words()) from error

    def _last_words(self) -> str:
        code = self._process.wait()
        how = f"died of {_SIGNALS.get(-code, -code)}" if code < 0 else f"ended with code {code}"
        self._stderr.seek(0)
        said = self._stderr.read()[-_STDERR_TAIL_BYTES:].decode(errors="replace")
        lines = [line for line in said.splitlines() if _is_diagnostic(line)]
        return "\n".join([f"the compiler {how}", *lines[:6]])

    def is_fit(self) -> bool:
        """Say whether the process is there to be asked, and not too old."""
        return self._process.poll() is None and self.served < _REQUESTS_PER_WORKER

    def kill(self) -> None:
        """End the process; whoever waits for its answer sees that, and calls `end`."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Kill the process and what is left of it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._requests, self._replies, self._stderr):
            with contextlib.suppress(OSError):
                stream.close()


class CompileService:
    """A pool of workers. Thread-safe: as many requests run at a time as there are workers.

    Attributes:
        size: how many workers there may be.
        started: how many were ever started.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.started = 0
        # Linux kills a worker when the *thread* that started it ends, so one that stays does.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="lowering-starter")
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)
        self._all: set[_Worker] = set()
        self._lock = threading.Lock()

    def run(
        self,
        stage: str,
        text: str,
        options: CompileOptions,
        limits: Limits,
        fault: str | None = None,
    ) -> bytes:
        """Run a stage in a worker.

        Args:
            stage: its name.
            text: its input.
            options: what it may know beside its input.
            limits: what it may take.
            fault: a failure to commit instead, for tests.

        Raises:
            StageError: the stage failed, or the worker crashed, hung or ran out of memory.
        """
        head = {
            "stage": stage,
            "options": options.to_json(),
            "memory_limit_bytes": limits.memory_bytes,
            "fault": fault,
        }
        try:
            reply, product = self._ask(head, text.encode(), limits.time_s)
        except WorkerCrashError as error:
            timed_out = isinstance(error, WorkerTimeoutError)
            raise StageError(stage, str(error), timed_out=timed_out) from error
        if "error" in reply:
            raise StageError(stage, reply["error"])
        return product

    def _ask(self, head: dict[str, Any], body: bytes, time_s: float) -> tuple[Any, bytes]:
        """Send a request; one that a used worker died of is sent once more, to a fresh one.

        The worker may have been dying already, of what is not the program's fault.
        """
        while True:
            was_used = False
            try:
                with self._worker() as worker:
                    was_used = worker.served > 0
                    try:
                        return worker.request(head, body, time_s)
                    except WorkerCrashError as error:
                        with self._lock:
                            if worker not in self._all:
                                raise CancelledError from error
                        raise
            except WorkerTimeoutError:
                raise
            except WorkerCrashError:
                if not was_used:
                    raise

    @contextlib.contextmanager
    def _worker(self) -> Iterator[_Worker]:
        """Lend a worker; one that is left in the middle of a request is ended."""
        worker = self._idle.get()
        try:
            if worker is not None and not worker.is_fit():  # or it died, or was ended, while idle
                self._end(worker)
                worker = None
            if worker is None:
                worker = self._starter.submit(_Worker).result()
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

    def _end(self, worker: _Worker) -> None:
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


def _is_diagnostic(line: str) -> bool:
    """Tell what a compiler says from its stack of C++ frames."""
    text = line.strip()
    is_frame = text.startswith(("#", "Stack dump", "PLEASE submit a bug")) or "0x0000" in text
    return bool(text) and not is_frame

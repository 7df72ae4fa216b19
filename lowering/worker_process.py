"""One worker process as the side that asks it sees it: its time, its end, and its last words."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, Any, BinaryIO, cast

from lowering.errors import WorkerStartError
from lowering.own_python import start_own
from lowering.worker import read_frame, write_frame

_SIGNALS = {s.value: s.name for s in signal.Signals}
_FATAL = "LLVM ERROR: "
_STDERR_TAIL_BYTES = 4000
_LAST_LINES = 6
_START_LIMIT_S = 300.0  # for the imports of a worker, on a machine that is busy with others
_REQUESTS_PER_WORKER = 300  # compilers leak: a process that has served this many is replaced


class WorkerCrashError(Exception):
    """A worker ended, or had to be ended, before it answered."""


class WorkerKilledError(WorkerCrashError):
    """A worker was killed by somebody else, such as Linux where memory is short."""


class WorkerTimeoutError(WorkerCrashError):
    """A worker had to be ended because its time was over."""


class WorkerProcess:
    """One worker process."""

    def __init__(self) -> None:
        self._stderr = _open_scratch()
        self._folder = _make_folder()
        try:
            self._process, self._replies = start_own(
                "lowering.worker",
                self._folder,
                output=self._stderr,
                stdin=subprocess.PIPE,
                bufsize=0,  # see `write_frame`
                start_new_session=True,  # Ctrl-C is for the process that asked
            )
        except BaseException:
            self._remove_folder()
            raise
        self._is_group_killed = False
        self.served = 0
        self._is_ready = False
        self._requests = cast(BinaryIO, self._process.stdin)

    def await_ready(self) -> None:
        """Wait until the worker has imported the compilers: no stage's time, so before the first.

        Raises:
            WorkerStartError: it ended before, or does not come up.
        """
        if not self._is_ready:
            try:
                with self._ended_after(_START_LIMIT_S):
                    self._receive()
            except WorkerCrashError as error:
                raise WorkerStartError(f"no compile worker comes up: {error}") from error
        self._is_ready = True

    def request(self, head: dict[str, Any], body: bytes, time_s: float) -> tuple[Any, bytes]:
        """Send a request and wait for its answer; with an `error`, there is what was on `stderr`.

        Raises:
            WorkerCrashError: there is no answer, or not in time, or it makes no sense; a worker
                that is not gone has to be ended.
        """
        self.served += 1
        self._stderr.seek(0)
        self._stderr.truncate()
        with self._ended_after(time_s):
            try:
                write_frame(self._requests, head, body)
            except BrokenPipeError as error:
                raise self._end_of_worker() from error
            reply, product = self._receive()
        if "error" in reply:
            reply["stderr"] = self._said()[-_LAST_LINES:]
        return reply, product

    @contextlib.contextmanager
    def _ended_after(self, time_s: float) -> Iterator[None]:
        """Kill the process when its time is over, wherever it hangs: whoever waits sees its end.

        Raises:
            WorkerTimeoutError: that was so.
        """
        is_over = threading.Event()

        def end() -> None:
            is_over.set()
            self._kill_group()

        timer = threading.Timer(min(time_s, threading.TIMEOUT_MAX), end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except WorkerCrashError as error:
            if is_over.is_set():
                raise WorkerTimeoutError(f"it did not end within {time_s:g} s") from error
            raise
        finally:
            timer.cancel()

    def _receive(self) -> tuple[Any, bytes]:
        try:
            return read_frame(self._replies)
        except EOFError as error:
            raise self._end_of_worker() from error
        except ValueError as error:
            raise WorkerCrashError(f"the compiler's answer makes no sense: {error}") from error

    def _end_of_worker(self) -> WorkerCrashError:
        """Wait until the process has ended, and say how."""
        code = self._process.wait()
        how = f"died of {_SIGNALS.get(-code, -code)}" if code < 0 else f"ended with code {code}"
        lines = self._said()
        if fatal := next((line for line in lines if line.startswith(_FATAL)), None):
            how += f" ({fatal})"
        kind = WorkerKilledError if code == -signal.SIGKILL else WorkerCrashError
        return kind("\n".join([f"the compiler {how}", *lines[:_LAST_LINES]]))

    def _said(self) -> list[str]:
        """Return the last that the process, or a linker that it ran, wrote on its stderr."""
        self._stderr.seek(0)
        said = self._stderr.read()[-_STDERR_TAIL_BYTES:].decode(errors="replace")
        return [line for line in said.splitlines() if _is_diagnostic(line)]

    def is_fit(self) -> bool:
        """Say whether the process is there to be asked, and not too old."""
        return self._process.poll() is None and self.served < _REQUESTS_PER_WORKER

    def kill(self) -> None:
        """End the process; whoever waits for its answer sees that, and calls `end`."""
        self._kill_group()
        self._process.wait()
        self._remove_folder()

    def _kill_group(self) -> None:
        """Kill the process and what it has started, such as a linker: it leads a group of its own.

        Once is enough, and later the number may be another group's.
        """
        if not self._is_group_killed:
            self._is_group_killed = True
            with contextlib.suppress(ProcessLookupError):  # all of it has ended
                os.killpg(self._process.pid, signal.SIGKILL)

    def _remove_folder(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def end(self) -> None:
        """Kill the process and what is left of it."""
        self.kill()
        for stream in (self._requests, self._replies, self._stderr):
            with contextlib.suppress(OSError):
                stream.close()

    def disown(self) -> None:
        """Forget the process, which is the parent's: this one was forked, and shares its pipes."""
        self._process.returncode = 0  # there is nothing to wait for
        for stream in (self._requests, self._replies, self._stderr):
            stream.close()


def _open_scratch() -> IO[bytes]:
    """Open a file for what a worker says; in memory where possible, as a disk may be full."""
    if sys.platform == "linux":
        return open(os.memfd_create("lowering-worker-stderr"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _make_folder() -> str:
    """Make a folder for what a worker's linkers write on the way; empty if that cannot be."""
    try:
        return tempfile.mkdtemp(prefix="npu-iree-worker-")
    except OSError:
        return ""


def _is_diagnostic(line: str) -> bool:
    """Tell what a compiler says from its stack of C++ frames."""
    text = line.strip()
    is_frame = text.startswith(("#", "Stack dump", "PLEASE submit a bug")) or "0x0000" in text
    return bool(text) and not is_frame

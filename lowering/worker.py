"""`python -m lowering.worker`: runs lowering stages for another process, without torch.

Requests and replies are frames on two pipes, stdin and one whose number is the first argument: the
lengths of a JSON head and of a body (8 bytes each, big-endian), the head, the body. The first frame
is a worker's own: it has imported the compilers, and is ready. A crash, a hang or an exhausted
memory in here is, over there, an ordinary exception (`lowering/service.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import resource
import shutil
import signal
import struct
import sys
import time
from typing import Any, BinaryIO

from lowering.errors import FlagError, said
from lowering.stages import CompileOptions, Stage
from lowering.stages.iree_session import load_iree
from lowering.stages.torch_mlir_context import load_torch_mlir

# stage -> module and value; torch is not among what these import.
STAGES = {
    "torch-to-linalg": ("lowering.stages.torch_to_linalg", "TORCH_TO_LINALG"),
    "linalg-to-flow": ("lowering.stages.linalg_to_flow", "LINALG_TO_FLOW"),
    "flow-to-vmfb": ("lowering.stages.flow_to_vmfb", "FLOW_TO_VMFB"),
    "torch-to-dispatches": ("lowering.stages.torch_to_dispatches", "TORCH_TO_DISPATCHES"),
}
OUT_OF_MEMORY = "it ran out of memory"
_LENGTHS = struct.Struct(">QQ")
_HEAD_BYTES = 1 << 30


def write_frame(stream: BinaryIO, head: dict[str, Any], body: bytes = b"") -> None:
    """Send one frame. The stream has no buffer: a forked process would send what is in it again."""
    data = json.dumps(head).encode()
    rest = memoryview(_LENGTHS.pack(len(data), len(body)) + data + body)
    while rest:
        rest = rest[stream.write(rest) :]


def read_frame(stream: BinaryIO) -> tuple[dict[str, Any], bytes]:
    """Receive one frame.

    Raises:
        EOFError: the other side is gone.
        ValueError: it has sent something else.
    """
    head_size, body_size = _LENGTHS.unpack(_read(stream, _LENGTHS.size))
    if head_size > _HEAD_BYTES:
        raise ValueError(f"no head is of {head_size} bytes")
    return json.loads(_read(stream, head_size)), _read(stream, body_size)


def _read(stream: BinaryIO, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            raise EOFError("the other side is gone")
        data += part
    return bytes(data)


def main(descriptor: int, folder: str) -> None:
    """Serve requests, with answers to a descriptor, until the other side closes its pipe.

    Compilers and linkers write their files on the way to the folder, which goes at the end; without
    one, to the system's.
    """
    die_with_parent()
    if folder:
        os.putenv("TMPDIR", folder)
    os.set_inheritable(descriptor, False)  # a linker that goes on must not keep it open
    requests = io.FileIO(os.dup(0), "rb")
    replies = io.FileIO(descriptor, "wb")
    _load_compilers()
    with contextlib.suppress(EOFError, BrokenPipeError):
        write_frame(replies, {"ready": True})
        while True:
            head, body = read_frame(requests)
            write_frame(replies, *_serve(head, body))
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _load_compilers() -> None:
    """Import what the stages need, so that none of them pays for it out of its own time."""
    for module, _ in STAGES.values():
        importlib.import_module(module)
    load_torch_mlir()
    load_iree()


def _serve(head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        os.chdir(head["folder"])
    except OSError:  # it is gone; most flags name no files, and none those of the last request
        os.chdir("/")
    _limit_memory(head["memory_limit_bytes"])
    stage = _stage(head["stage"])
    options = CompileOptions.from_json(head["options"])
    started = time.perf_counter()
    try:
        _commit_fault(head.get("fault"))
        product = stage.run(body.decode(), options)
        problem = stage.verify(product)
    except MemoryError:
        return {"error": OUT_OF_MEMORY}, b""
    except FlagError as error:
        return {"error": error.diagnostics, "flags": error.flags}, b""
    except Exception as error:
        return {"error": said(error)}, b""
    if problem:
        return {"error": problem}, b""
    data = product if isinstance(product, bytes) else product.encode()
    return {"seconds": time.perf_counter() - started}, data


def _stage(name: str) -> Stage:
    module, value = STAGES[name]
    stage: Stage = getattr(importlib.import_module(module), value)
    return stage


def allowed_memory(limit_bytes: int) -> int:
    """Return how much address space a process may have under a limit: `ulimit -v` is another."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    return limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)


def _limit_memory(limit_bytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (allowed_memory(limit_bytes), hard))


def die_with_parent() -> None:
    """Ask Linux to kill us when the process that started us ends, however it ends."""
    if sys.platform == "linux":
        import ctypes

        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def _commit_fault(fault: str | None) -> None:
    """Do what a test asks for in the place of a compiler that fails."""
    match fault:
        case "abort":
            os.abort()
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            signal.pause()
        case "memory":
            hoard = []
            while True:
                hoard.append(bytearray(1 << 28))
        case "error":
            raise SystemExit("asked to fail")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

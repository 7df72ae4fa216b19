"""`fork.py`: compiles; in a forked child, too; loads data by forked workers; compiles again."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator

import cases
import torch
from torch import nn
from torch.utils.data import DataLoader

import npu_iree
from npu_iree.runner import Runner
from npu_iree.workers import compile_service

X = torch.ones(2, 4)


@contextlib.contextmanager
def another_call() -> Iterator[None]:
    """Have another thread stand in the middle of a call, with the lock of the weights."""
    (runner,) = (found for found in gc.get_objects() if type(found) is Runner)
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with runner._weights.lock:
            is_held.set()
            is_over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def in_child(compiled: object) -> str:
    """Do what a forked process may, and may not; return what it answers."""
    refusal = ""
    try:
        compiled(X)  # type: ignore[operator]
    except npu_iree.NpuIreeError as error:
        refusal = str(error)
    return json.dumps({"right": cases.is_right("plus-1"), "refusal": refusal})


def forked(compiled: object) -> dict[str, object]:
    """Fork; return the child's answer, and how it ended."""
    answers, to_parent = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(to_parent, in_child(compiled).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.exit(0)  # as a program ends, with all that is registered for that
    os.close(to_parent)
    with os.fdopen(answers) as stream:
        text = stream.read()
    return {**json.loads(text or "{}"), "code": os.waitpid(child, 0)[1]}


def main() -> None:
    function = nn.Linear(4, 4).requires_grad_(False)
    compiled = torch.compile(function, backend="npu_iree")
    compiled(X)
    started = compile_service().started
    with another_call():
        child = forked(compiled)
    data = [torch.full((2,), float(i)) for i in range(8)]
    batches = [batch.sum().item() for batch in DataLoader(data, batch_size=2, num_workers=2)]
    torch.testing.assert_close(compiled(X), function(X))
    again = cases.is_right("plus-100")
    restarted = compile_service().started - started
    print(json.dumps({"child": child, "sum": sum(batches), "right": again, "restarted": restarted}))


if __name__ == "__main__":
    main()

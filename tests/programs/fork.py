"""`fork.py`: compiles; in a forked child, too; loads data by forked workers; compiles again."""

from __future__ import annotations

import json
import os
import sys
import traceback

import cases
import torch
from torch.utils.data import DataLoader

import npu_iree
from npu_iree.workers import compile_service


def in_child(compiled: object) -> str:
    """Do what a forked process may, and may not; return what it answers."""
    inputs = cases.CASES["f32"][1]
    refusal = ""
    try:
        compiled(*inputs)  # type: ignore[operator]
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
    function, inputs, _ = cases.CASES["f32"]
    compiled = torch.compile(function, backend="npu_iree")
    compiled(*inputs)
    started = compile_service().started
    child = forked(compiled)
    data = [torch.full((2,), float(i)) for i in range(8)]
    batches = [batch.sum().item() for batch in DataLoader(data, batch_size=2, num_workers=2)]
    torch.testing.assert_close(compiled(*inputs), function(*inputs))
    again = cases.is_right("plus-100")
    restarted = compile_service().started - started
    print(json.dumps({"child": child, "sum": sum(batches), "right": again, "restarted": restarted}))


if __name__ == "__main__":
    main()

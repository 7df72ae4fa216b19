"""`forked_results.py`: compiles, and reads the result of a call in a forked child."""

from __future__ import annotations

import json
import os

import torch

import npu_iree


def main() -> None:
    device = npu_iree.open_device("npu-local")
    x = torch.randn(1024, 1024)
    compiled = torch.compile(lambda x: x @ x, backend="npu_iree")
    product = compiled(x).numpy()  # which has no threads that a child lacks
    total = product.sum()
    if not (child := os.fork()):
        os._exit(0 if product.sum() == total else 1)
    is_right = os.waitpid(child, 0)[1] == 0
    print(json.dumps({"bytes": device.blocks.nbytes, "right": is_right}))


if __name__ == "__main__":
    main()

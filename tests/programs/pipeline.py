"""CPU -> npu -> npu -> CPU over two batches, the compute of the first held; tell the timeline."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any

import torch

import npu_iree
from npu_iree.torch_device.storage import handle_of


def tell(device: npu_iree.Device) -> dict[str, Any]:
    """Compute two batches on the device behind "npu"."""
    compute, gate, event = torch.npu.Stream(), device.gate(), torch.npu.Event()
    event._points = (gate.point,)
    compute.wait_event(event)

    def submit(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        put = torch.sin(batch).to("npu", non_blocking=True)  # op1 on the CPU
        with torch.npu.stream(compute):
            return put, torch.relu(torch.neg(put))  # op2, op3

    batches = [torch.randn(64, 64) for _ in range(2)]
    ones = torch.ones(64, 64).npu()
    torch.relu(torch.neg(ones)).cpu()  # both are compiled
    with npu_iree.record_timeline() as timeline:
        with npu_iree.copy_budget(d2h=0, waits=0):
            submitted = [submit(batch) for batch in batches]
        for put, _ in submitted:
            handle_of(put).wait(timeout_s=30)  # the uploads of both land, and nothing has run
        held = [not handle_of(result).is_ready() for _, result in submitted]
        while sum(math.isfinite(span.ended_s) for span in timeline.spans) < len(batches):
            time.sleep(0.01)  # until the recorder, threads of its own, has seen it, too
        gate.open()
        results = [result.to("cpu").exp() for _, result in submitted]  # op4
    rights = [
        torch.equal(r, (-b.sin()).relu().exp()) for r, b in zip(results, batches, strict=True)
    ]
    spans = [asdict(span) for span in timeline.spans]
    return {"held": held, "right": rights, "spans": spans}

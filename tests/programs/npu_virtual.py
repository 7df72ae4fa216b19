"""Use "npu" over a device with memory of its own; print what was told, and seen by the device."""

from __future__ import annotations

import json
from typing import Any

import donated_cache
import pipeline
import torch
from torch import nn

import npu_iree


def train(where: str, compiled: bool, batches: list[torch.Tensor]) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 1)).to(where)
    call = torch.compile(model, backend="npu_iree") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches:
        with npu_iree.copy_budget(d2h=0, waits=0):
            x = batch.to(where)
            loss = call(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss)
    return [loss.item() for loss in losses]


def training(device: npu_iree.Device) -> dict[str, Any]:
    """Train with and without a compiler; tell the losses, and what crossed as the device saw it."""
    count = device.memory.count
    batches = [torch.randn(4, 8) for _ in range(3)]
    losses = {"cpu": train("cpu", False, batches)}
    crossed = {}
    for compiled in (False, True):
        before = count.d2h
        with npu_iree.record_transfers() as ledger:
            losses[f"npu {compiled}"] = train("npu", compiled, batches)
        counted = [e for e in ledger.copies("d2h") if e.nbytes]
        crossed[f"npu {compiled}"] = [count.d2h - before, len(counted)]
    return {"losses": losses, "crossed": crossed}


def main() -> None:
    npu_iree.register_device("npu-virtual")
    device = npu_iree.open_device("npu-virtual")
    told = {
        "pipeline": pipeline.tell(device),
        "donated cache": donated_cache.tell(),
        "training": training(device),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()

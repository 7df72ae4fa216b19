"""Register "npu" after backward passes on the CPU, then train on it in threads; print losses."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import npu_iree


def train(where: str) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.copy_(torch.randn(1, 4, generator=generator))
        model.bias.zero_()
    model.to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        x = torch.randn(8, 4, generator=generator).to(where)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        with npu_iree.record_transfers() as ledger, npu_iree.copy_budget(d2h=0, waits=0):
            loss.backward()
        assert not ledger.waits
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    expected = train("cpu")
    npu_iree.register_device()
    with ThreadPoolExecutor(2) as pool:
        losses = [train("npu"), *pool.map(train, ["npu", "npu", "cpu"])]
    print(json.dumps({"expected": expected, "losses": losses}))


if __name__ == "__main__":
    main()

"""What ops are called, and which ones a name means."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def op_name(target: object) -> str:
    """Return the name we give an op everywhere, e.g. `aten.add.Tensor`."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def matches(op: str, patterns: Iterable[str]) -> bool:
    """Say whether `op` is named by one of `patterns`: `aten.add.Tensor`, `aten.add` or `add`."""
    packet = op.rpartition(".")[0] if op.count(".") >= 2 else op
    names = {op, packet, packet.rpartition(".")[2]}
    return not names.isdisjoint(patterns)

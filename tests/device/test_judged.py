"""The conformance suite op by op on "npu": where kernels ran is told as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npu_iree.conformance import eager, judge
from npu_iree.conformance.cases import Case


def test_where_kernels_ran_is_told_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an op makes from nothing is made on "npu", too."""
    calls: dict[Any, tuple[Any, dict[str, Any], str]] = {
        torch.Tensor.t: (torch.ones(2, 3), {}, "idle"),
        torch.neg: (torch.ones(2, 3), {}, "device"),
        torch.arange: (3, {"device": "cpu"}, "device"),
        torch.median: (torch.ones(3), {}, "host"),
    }
    case = Case("planted", 0, "f32", 1, False)
    for op, (value, kwargs, outcome) in calls.items():
        sample = SimpleNamespace(input=value, args=(), kwargs=kwargs)
        info = SimpleNamespace(
            op=op, inplace_variant=None, sample_inputs=lambda *_, s=sample, **__: [s]
        )
        monkeypatch.setattr(judge, "database", lambda found=info: [found])
        monkeypatch.setattr(eager, "database", lambda found=info: [found])
        assert eager.judge_eager(case, "npu-local", print).outcome == outcome

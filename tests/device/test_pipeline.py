"""CPU -> npu -> npu -> CPU: uploads of the next batch go on beside the compute of this one."""

from __future__ import annotations

from typing import Any

import torch

import npu_iree


def test_the_next_batch_is_uploaded_while_this_one_is_computed(
    told_of_npu_virtual: dict[str, Any],
) -> None:
    told = told_of_npu_virtual["pipeline"]
    assert told["right"] == told["held"] == [True, True]
    spans = told["spans"]
    first, second = ("put a CPU tensor", "aten.neg.default"), "aten.relu.default"
    assert [s["name"] for s in spans] == [*first, second, *first, second, "get", "get"]
    for span in spans:
        assert span["submitted_s"] <= span["started_s"] <= span["ended_s"]
    upload, op2, op3 = spans[3], spans[1], spans[2]
    assert op2["submitted_s"] < upload["submitted_s"] <= upload["ended_s"] < op2["ended_s"]
    assert op3["submitted_s"] < op2["ended_s"], "op2 and op3 are submitted ahead"


def test_a_timeline_is_printed_in_order() -> None:
    a = torch.ones(3, device="npu")
    with npu_iree.record_timeline() as timeline:
        b = (a + 1) * 2
    assert b.tolist() == [4, 4, 4]
    assert [span.name for span in timeline.spans] == ["aten.add.Tensor", "aten.mul.Tensor"]
    lines = str(timeline).splitlines()
    assert lines[0].split()[:3] == ["submitted", "started", "ended"]
    assert lines[1].endswith("aten.add.Tensor")

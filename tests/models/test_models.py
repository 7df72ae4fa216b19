"""Real models give eager's numbers, each as one graph, one region, and no host op."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from models.zoo import ZOO, ZooModel, flatten
from npu_iree.tolerances import largest_difference

LIMIT = 1e-4


# ResNet-50 takes as long as three others; what the command line makes of it is in `tests/offline`.
_LONG = {"resnet50"}
_ROWS = [
    pytest.param(row, id=row.name, marks=[pytest.mark.sweep] if row.name in _LONG else [])
    for row in ZOO
]


@pytest.mark.slow
@pytest.mark.parametrize("row", _ROWS)
@torch.no_grad()
def test_a_model_is_one_region_with_eagers_numbers(row: ZooModel, counts: Counter[str]) -> None:
    model, inputs = row.build(), row.inputs()
    expected = flatten(model(**inputs))
    compiled = torch.compile(model, backend="npu_iree")
    actual = flatten(compiled(**inputs))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        assert actual[name].stride() == value.stride()
        assert largest_difference(actual[name], value) < LIMIT, name
    del counts["compile_ms"]
    expected = {"graphs": 1, "regions": 1, "host_ops": 0, "unsupported_ops": 0, "compiles": 1}
    assert counts == expected

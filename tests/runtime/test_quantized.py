"""Quantized weights: they are read as the bytes that they are, once, and bound as parameters."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tests.tolerances import assert_same

WIDE, DEEP = 96, 64


class Quantized(torch.Tensor):
    """A weight of signed bytes, and a scale for each row, as libraries for quantization have it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    @torch._disable_dynamo
    def __new__(cls, values: torch.Tensor, scales: torch.Tensor) -> Quantized:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made: Quantized = make(cls, values.shape, dtype=scales.dtype)
        return made

    @torch._disable_dynamo
    def __init__(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        self.values, self.scales = values, scales

    def __repr__(self, **_: Any) -> str:
        return "Quantized"  # PyTorch's own runs ops

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scales"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: Any) -> Quantized:
        return Quantized(parts["values"], parts["scales"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if op is torch.ops.aten.detach.default:
            return Quantized(args[0].values, args[0].scales)

        def plain(weight: Quantized) -> torch.Tensor:
            return weight.values.to(weight.dtype) * weight.scales

        args, kwargs = pytree.tree_map_only(Quantized, plain, (args, kwargs or {}))
        return op(*args, **kwargs)


class ByColumns(torch.nn.Module):
    """A linear layer of bytes, whose scales are multiplied with the result."""

    values: torch.Tensor
    scales: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.randint(-128, 128, (WIDE, DEEP), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(WIDE))
        self.bias = torch.nn.Parameter(torch.randn(WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, self.values.to(x.dtype)) * self.scales + self.bias)


@pytest.mark.parametrize("rows", [1, 2, 4, 20, 130])
@torch.no_grad()
def test_bytes_are_read_as_such_by_the_product(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: Counter[str]
) -> None:
    monkeypatch.setenv("NPU_IREE_DUMP", str(tmp_path))
    monkeypatch.setenv("NPU_IREE_CACHE", "off")
    model, x = ByColumns(), torch.randn(rows, DEEP) * 0.02
    assert_same(torch.compile(model, backend="npu_iree")(x), model(x))
    assert counts["host_ops"] == 0
    (file,) = tmp_path.rglob("03-*.mlir")
    programs = [line for line in file.read_text().splitlines() if " func.func @" in line]
    assert programs
    assert f"{WIDE}x{DEEP}xf32" not in "".join(programs), "the weight is in memory as floats"


@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_a_weight_made_of_tensors_is_bound(
    dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: Counter[str]
) -> None:
    monkeypatch.setenv("NPU_IREE_DUMP", str(tmp_path))
    monkeypatch.setenv("NPU_IREE_CACHE", "off")
    linear = torch.nn.Linear(DEEP, WIDE)
    values = torch.randint(-128, 128, (WIDE, DEEP), dtype=torch.int8)
    weight = Quantized(values, torch.rand(WIDE, 1))
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    compiled = torch.compile(linear, backend="npu_iree", dynamic=dynamic)
    for rows in (3, 5):
        x = torch.randn(rows, DEEP) * 0.02
        assert_same(compiled(x), linear(x))
    values.neg_()  # in place, which is noticed
    assert_same(compiled(x), linear(x))
    assert counts["host_ops"] == 0
    bound = [
        json.loads(f.read_text())["parameters"]["main"] for f in tmp_path.rglob("options.json")
    ]
    assert all(len(parameters) == 3 for parameters in bound)  # bytes, scales and bias
    assert bound

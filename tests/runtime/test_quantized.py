"""Quantized weights: they are read as the bytes that they are, once, and bound as parameters."""

from __future__ import annotations

import copy
import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from dumps import signatures
from npu_iree.tolerances import largest_difference
from tolerances import assert_same

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

    def __init__(self, wide: int = WIDE, deep: int = DEEP) -> None:
        super().__init__()
        self.register_buffer("values", torch.randint(-128, 128, (wide, deep), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(wide))
        self.bias = torch.nn.Parameter(torch.randn(wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, self.values.to(x.dtype)) * self.scales + self.bias)


@pytest.mark.parametrize("rows", [1, 2, 4, 20, 130])
@torch.no_grad()
def test_bytes_are_read_as_such_by_the_product(rows: int, dump: Path, counts: Counter[str]) -> None:
    model, x = ByColumns(), torch.randn(rows, DEEP) * 0.02
    assert_same(torch.compile(model, backend="npu_iree")(x), model(x))
    assert counts["host_ops"] == 0
    assert f"{WIDE}x{DEEP}xf32" not in signatures(dump), "the weight is in memory as floats"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("sizes", [(WIDE, DEEP), (70, 52)])
@torch.no_grad()
def test_bytes_beside_any_floats(
    sizes: tuple[int, int], dynamic: bool, dtype: torch.dtype, counts: Counter[str]
) -> None:
    model = ByColumns(*sizes).to(dtype)
    compiled = torch.compile(model, backend="npu_iree", dynamic=dynamic)
    exact = copy.deepcopy(model).double()
    for rows in (1, 3, 20):
        x = (torch.randn(rows, sizes[1]) * 0.02).to(dtype)
        ours, eagers, truth = compiled(x), model(x), exact(x.double())
        assert ours.dtype == dtype
        error = largest_difference(eagers.double(), truth)
        assert largest_difference(ours.double(), truth) <= 2 * error + 1e-5
    assert counts["host_ops"] == 0


@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_a_weight_made_of_tensors_is_bound(dynamic: bool, dump: Path, counts: Counter[str]) -> None:
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
    bound = [json.loads(f.read_text())["parameters"]["main"] for f in dump.rglob("options.json")]
    assert all(len(parameters) == 3 for parameters in bound)  # bytes, scales and bias
    assert bound


def quantized_ops() -> dict[str, Any]:
    """Return calls of the ops of quantized graphs, of `x`: `[6, 32]`."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    ops = torch.ops.quantized_decomposed
    byte, signed = (0, 255, torch.uint8), (-128, 127, torch.int8)
    scales, zeros = torch.rand(6) / 50 + 0.01, torch.arange(6)
    number, offset = torch.tensor(0.03), torch.tensor(7)
    columns = scales[:, None], zeros[:, None].float()
    groups = torch.rand(6, 4) / 50 + 0.01, torch.zeros(6, 4, dtype=torch.int32)

    def in_groups(x: torch.Tensor) -> Any:
        q = ops.quantize_per_channel_group(x, *groups, *signed, 8)
        return q, ops.dequantize_per_channel_group(q, *groups, *signed, 8, torch.float32)

    def by_token(x: torch.Tensor) -> Any:
        found = ops.choose_qparams_per_token_asymmetric(x, torch.int8)
        return [*found, ops.dequantize_per_token(x.char(), *columns, *signed, torch.float32)]

    return {
        "tensor": lambda x: ops.quantize_per_tensor(x, 0.031, 128, *byte),
        "tensor, signed": lambda x: ops.quantize_per_tensor(x.half(), 0.031, -3, *signed),
        "tensor, by tensors": lambda x: ops.quantize_per_tensor(x, number, offset, *byte),
        "from a tensor": lambda x: ops.dequantize_per_tensor(x.char(), 0.031, 5, *signed),
        "from it, by tensors": lambda x: ops.dequantize_per_tensor(
            x.char(), number, offset, *signed
        ),
        "channel": lambda x: ops.quantize_per_channel(x, scales, zeros, 0, *signed),
        "from channels": lambda x: ops.dequantize_per_channel(
            x.char(), scales.double(), zeros, 0, *signed
        ),
        "token": lambda x: ops.quantize_per_token(x, *columns, *signed),
        "from tokens": by_token,
        "groups": in_groups,
    }


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_ops_of_quantized_graphs_run_on_the_device(dynamic: bool, counts: Counter[str]) -> None:
    calls = quantized_ops()
    x = torch.randn(6, 32) * 3
    compiled = torch.compile(
        lambda x: [call(x) for call in calls.values()], backend="npu_iree", dynamic=dynamic
    )
    for (name, call), result in zip(calls.items(), compiled(x), strict=True):
        torch.testing.assert_close(result, call(x), msg=lambda m, name=name: f"{name}: {m}")
    assert counts["host_ops"] == 0

"""Mixtures of experts: which matrix a row is multiplied by is data, and stays on the device."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
import transformers.integrations.moe  # registers `grouped_mm_fallback`
from torch import nn

from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")

EXPERTS, INNER, OUTER = 4, 24, 40


def mixture() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config)


def tokens(length: int) -> torch.Tensor:
    return torch.randint(64, (2, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.sweep
def test_a_model_is_one_region_for_all_lengths(target: str, counts: Counter[str]) -> None:
    model = mixture().eval()
    options = {"target": target, "fallback": "error"}
    compiled = torch.compile(model, backend="npu_iree", dynamic=True, options=options)
    with torch.no_grad():
        for length in (9, 5, 30):
            assert_same(compiled(tokens(length)).logits, model(tokens(length)).logits)
    assert (counts["graphs"], counts["regions"], counts["refused_flags"]) == (1, 1, 0)


@pytest.mark.sweep
def test_a_model_trains_on_the_device(counts: Counter[str]) -> None:
    model = mixture()
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="npu_iree", options={"fallback": "error"})
    ids = tokens(12)
    losses = [call(ids, labels=ids).loss for call in (compiled, model)]
    for loss in losses:
        loss.backward()
    assert_same(*losses)
    for one, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert_same(one.grad, expected.grad)
    assert (counts["graphs"], counts["regions"]) == (2, 2)


class Grouped(nn.Module):
    def __init__(self, *, is_transposed: bool, outer: int = OUTER) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shape = (EXPERTS, outer, INNER) if is_transposed else (EXPERTS, INNER, outer)
        self.weight = nn.Parameter(torch.randn(shape, generator=generator))
        self.is_transposed = is_transposed

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        weight = self.weight.transpose(1, 2) if self.is_transposed else self.weight
        return torch.ops.transformers.grouped_mm_fallback(x, weight, ends)


@pytest.mark.parametrize("is_transposed", [False, True], ids=["inner by outer", "outer by inner"])
@pytest.mark.parametrize(("rows", "outer"), [(2, 32), (3, 20), (50, 64), (50, 31), (400, 64)])
def test_weights_are_read_where_they_lie(rows: int, outer: int, is_transposed: bool) -> None:
    """Few rows and many, columns that fill the panels and such that do not."""
    layer = Grouped(is_transposed=is_transposed, outer=outer)
    compiled = torch.compile(layer, backend="npu_iree", options={"fallback": "error"})
    x = torch.randn(rows, INNER)
    with torch.no_grad():
        for cuts in ([0, 0, 0, rows], [1, 1, 2, rows], [0, rows, rows, rows], [0, 1, 1, 2]):
            ends = torch.tensor(cuts, dtype=torch.int32)
            assert_same(compiled(x, ends), layer(x, ends))


def test_a_group_for_no_rows_and_matrices_that_are_computed() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> Any:
        return torch.ops.transformers.grouped_mm_fallback(x, weight.exp(), ends)

    compiled = torch.compile(function, backend="npu_iree", options={"fallback": "error"})
    x, weight = torch.randn(100, INNER), torch.randn(EXPERTS, INNER, OUTER)
    ends = torch.tensor([0, 60, 60, 100])
    assert_same(compiled(x, weight, ends), function(x, weight, ends))
    one = torch.tensor([70])
    assert_same(compiled(x, weight[:1], one), function(x, weight[:1], one))


@pytest.mark.slow
def test_pytorchs_own_op_and_its_gradients() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return nn.functional.grouped_mm(x, weight, offs=ends)

    outcomes = []
    for call in (function, torch.compile(function, backend="npu_iree")):
        generator = torch.Generator().manual_seed(2)
        shapes = ((64, INNER), (EXPERTS, INNER, OUTER))
        inputs = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
        leaves = [value.requires_grad_() for value in inputs]
        result = call(*leaves, torch.tensor([10, 10, 30, 64], dtype=torch.int32))
        result.backward(torch.randn(result.shape, generator=generator).bfloat16())
        outcomes.append([result.detach(), *(leaf.grad for leaf in leaves)])
    assert_same(*outcomes[::-1])


def test_of_any_number_of_matrices_some_are_chosen(counts: Counter[str]) -> None:
    x, matrices, chosen = torch.randn(4, 3, 32), torch.randn(6, 32, 64), torch.tensor([5, 0, 2, 2])
    torch._dynamo.mark_dynamic(matrices, 0)

    def function(x: torch.Tensor, matrices: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, matrices[chosen])

    given = x, matrices, chosen
    assert_same(torch.compile(function, backend="npu_iree")(*given), function(*given))
    assert counts["refused_flags"] == 0

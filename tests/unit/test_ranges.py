"""Which sizes an exported program is taken to be right for, and what it takes for granted."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch.export import Dim, ExportedProgram

from lowering.decompositions import decomposition_table
from lowering.errors import ExportError
from lowering.functional import functional


class Resized(torch.nn.Module):
    """Divides by one less than a size, once it is decomposed."""

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        size = other.shape[-2:]
        return torch.nn.functional.interpolate(x, size, mode="bilinear", align_corners=True)


class Added(torch.nn.Module):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x.sum() + other


class Odd(torch.nn.Module):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x * 2 if other.shape[2] % 2 else x


def exported(model: torch.nn.Module, size: Any) -> ExportedProgram:
    images = torch.ones(1, 2, 4, 4), torch.ones(1, 1, 5, 5)
    return torch.export.export(model, images, dynamic_shapes=({}, {2: size}))


@pytest.mark.parametrize(("model", "least"), [(Resized(), 2), (Added(), 1)])
def test_a_size_of_1_is_let_in_where_what_is_decomposed_is_right_too(
    model: torch.nn.Module, least: int
) -> None:
    program = functional(exported(model, Dim("height", min=1)), decomposition_table())
    assert [limits.lower for limits in program.range_constraints.values()] == [sympy.Integer(least)]


def test_what_is_taken_for_granted_is_not_lost_with_the_example_inputs() -> None:
    program = exported(Odd(), Dim.DYNAMIC)
    program._example_inputs = None
    with pytest.raises(ExportError, match=r"takes for granted that .*% 2.*example inputs"):
        functional(program, decomposition_table())

"""The table of device programs: what each computes, from which lines, and how much work it is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from cpus import WIDE
from lowering.dispatches import list_dispatches
from lowering.manifest import Dispatch
from lowering.offline import capture_exports
from lowering.pipeline import Toolchain
from lowering.program import Program

HERE = Path(__file__)


def listed(
    module: torch.nn.Module, *args: torch.Tensor, flags: tuple[str, ...] = (), dynamic: bool = False
) -> tuple[Dispatch, ...]:
    """Return the device programs of a module."""
    shapes = tuple({0: torch.export.Dim("n", max=64)} for _ in args) if dynamic else None
    exported = torch.export.export(module, args, dynamic_shapes=shapes)
    (export,) = capture_exports({"main": exported})
    program = Program("main", {"main": export.region()})
    return list_dispatches(program, WIDE, flags or WIDE.flag_sets[0], Toolchain())


def named(dispatches: tuple[Dispatch, ...], part: str) -> Dispatch:
    (found,) = (d for d in dispatches if part in d.name)
    return found


def line_of(code: str) -> int:
    lines = HERE.read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.strip() == code)


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        x = torch.tanh(self.layer(x) * 1)
        x = torch.tanh(self.layer(x) * 1 * 1)
        return x


class Product(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y


class Chosen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 64, 48))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.weight[chosen].transpose(1, 2))


class Padded(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, self.weight, padding=1)


class Soft(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, row: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * row + one, -1)


class Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(1000, 64)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.table(rows) * 2


class Convolved(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(8, 16, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


def test_bytes_and_arithmetic_of_a_batched_product() -> None:
    found = listed(Product(), torch.ones(3, 8, 16), torch.ones(3, 16, 32))
    product = named(found, "matmul")
    assert product.flops == 2 * 3 * 8 * 16 * 32
    assert product.nbytes == 4 * 3 * (8 * 16 + 16 * 32 + 8 * 32)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float16, 2)])
def test_softmax_is_five_operations_an_element(dtype: torch.dtype, size: int) -> None:
    (found,) = listed(Soft(), torch.ones(32, 1504, dtype=dtype))
    assert found.nbytes == 2 * size * 32 * 1504
    if dtype is torch.float32:
        assert found.flops == 32 * 5 * 1504


def test_bytes_of_numbers_for_each_row_and_for_all() -> None:
    (found,) = listed(Scaled(), torch.ones(32, 1504), torch.ones(32, 1), torch.tensor(2.0))
    assert found.nbytes == 4 * (2 * 32 * 1504 + 32 + 1)
    assert found.flops == 32 * (5 + 2) * 1504


def test_the_arithmetic_of_a_convolution_is_in_one_of_its_programs() -> None:
    found = listed(Convolved(), torch.ones(1, 8, 18, 18))
    assert max(d.flops or 0 for d in found) == 2 * 16 * 8 * 9 * 16 * 16


def test_a_convolution_of_several_images_counts_no_padding() -> None:
    images, weight = torch.ones(8, 16, 7, 7), torch.ones(64, 16, 3, 3)
    found = named(listed(Padded(weight), images), "_conv_")
    assert found.flops == 2 * 8 * 64 * 16 * (3 * 7 - 2) ** 2
    padded, made = 8 * 16 * 9 * 9, 8 * 64 * 7 * 7
    assert found.nbytes == 4 * (padded + weight.numel() + made)


def test_matrices_that_are_chosen_are_not_copied() -> None:
    found = listed(Chosen(), torch.ones(5, 16, 48), torch.zeros(5, dtype=torch.int64))
    product, *others = sorted(found, key=lambda d: "matmul" not in d.name)
    assert (product.nbytes, product.flops) == (None, 2 * 5 * 16 * 64 * 48)
    at_load = [d for d in others if d.name.startswith("_initializer")]
    assert [d.nbytes for d in at_load] == [2 * 4 * 8 * 64 * 48], "packed once"
    assert max(d.nbytes or 0 for d in others if d not in at_load) < 1000, "indices alone"


def test_what_depends_on_sizes_is_unknown() -> None:
    (found,) = listed(Soft(), torch.ones(32, 64), dynamic=True)
    assert (found.nbytes, found.flops) == (None, None)


def test_what_depends_on_data_is_unknown() -> None:
    rows, check = listed(Rows(), torch.zeros(5, dtype=torch.int64))
    assert (rows.nbytes, rows.flops) == (None, 5 * 64 * 3)  # the index kept in bounds, and `* 2`
    assert check.nbytes is not None


def test_equal_device_programs_tell_all_lines_that_they_are_from() -> None:
    found = listed(Twice(), torch.ones(8, 32))
    lines = {where.partition(" in ")[0] for d in found for _, where in d.ops}
    codes = (
        "x = torch.tanh(self.layer(x))",
        "x = torch.tanh(self.layer(x) * 1)",
        "x = torch.tanh(self.layer(x) * 1 * 1)",
    )
    assert lines == {f"{HERE}:{line_of(code)}" for code in codes}
    assert len([d for d in found if "matmul" in d.name]) < 3


def test_what_cannot_be_listed_is_logged_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = listed(Soft(), torch.ones(4, 4), flags=("--no-such-flag",))
    assert found == ()
    assert "profiles will tell no lines and no work" in caplog.text

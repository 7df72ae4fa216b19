"""Arithmetic on bytes (uint8): what eager gives, on the device, above 127 and where it wraps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from tolerances import assert_same

BYTES = torch.tensor([0, 1, 5, 127, 128, 129, 200, 254, 255], dtype=torch.uint8)
PAIRS = torch.cartesian_prod(BYTES, BYTES).T.contiguous()
OTHERS = {
    "bytes": PAIRS[1],
    "one byte": torch.tensor(200, dtype=torch.uint8),
    "a large integer": torch.tensor(300),
    "signed bytes": PAIRS[1].to(torch.int8).clamp_min(1),
    "flags": PAIRS[1] > 100,
    "halves": PAIRS[1].half(),
    "0.5": 0.5,
    "-3": -3,
    "300": 300,
    "128": 128,
}
OPS: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "add some of": lambda x, y: torch.add(x, y, alpha=3),
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: y - x,
    "mul": lambda x, y: x * y,
    "floor": lambda x, y: x // y,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "remainder": lambda x, y: x % y,
    "fmod": torch.fmod,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda x, y: torch.where(x > 127, x, y),
    "clamp": lambda x, y: torch.clamp(x, y),
    "clamp max": lambda x, y: torch.clamp(x, max=y),
    "cat": lambda x, y: torch.cat([x, y]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_two_operands(name: str, counts: Counter[str]) -> None:
    y = OTHERS[name]
    x = PAIRS[0]
    if isinstance(y, torch.Tensor) and not y.is_floating_point():
        y = y.clone()
        y[y == 0] = 1  # which divides
    taken = {}
    for op, function in OPS.items():
        try:
            taken[op] = function(x, y)
        except (RuntimeError, TypeError):
            continue  # eager has no such op

    def all_of(x: torch.Tensor) -> list[torch.Tensor]:
        return [OPS[op](x, y) for op in taken]

    assert len(taken) > 10
    found = torch.compile(all_of, backend="npu_iree")(x)
    for (op, expected), result in zip(taken.items(), found, strict=True):
        torch.testing.assert_close(
            result, expected, equal_nan=True, msg=lambda m, op=op: f"{op}: {m}"
        )
    assert counts["host_ops"] == 0


@pytest.mark.sweep
def test_one_operand(counts: Counter[str]) -> None:
    x = PAIRS[0].view(9, 9)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        values, places = torch.sort(x, dim=1, descending=True, stable=True)
        return [
            *(x.all(), x.any(), x.all(1), x.any(0), x.max(), x.min(), x.prod(1), 255 - x, ~x, -x),
            *(values, places, torch.topk(x, 3).values),
            *(torch.full_like(x, 200), torch.zeros_like(x, dtype=torch.int32), x.float() / 255),
            *(torch.gather(x, 1, places), F.embedding(places, x), x >> 4 | x << 4, x.square()),
            torch.zeros_like(x).scatter_add(0, places, x),
            *(x.prod(1, dtype=torch.int32), torch.full_like(x.T, 200) + 1),
        ]

    assert_same(torch.compile(function, backend="npu_iree")(x), function(x))
    assert counts["host_ops"] == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_of_four_bits_are_unpacked_on_the_device(
    dynamic: bool, counts: Counter[str]
) -> None:
    class Packed(torch.nn.Module):
        """A linear layer whose weight is two to a byte, with a scale and an offset for a row."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("packed", torch.randint(256, (16, 32), dtype=torch.uint8))
            self.register_buffer("offset", torch.randint(16, (16, 1), dtype=torch.uint8))
            self.register_buffer("scale", torch.rand(16, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            halves = torch.stack([self.packed & 0xF, self.packed >> 4], -1).flatten(1)
            return F.linear(x, (halves - self.offset).view(torch.int8) * self.scale)

    model = Packed()
    compiled = torch.compile(model, backend="npu_iree", dynamic=dynamic)
    for rows in (3, 5) if dynamic else (3,):
        x = torch.randn(rows, 64)
        assert_same(compiled(x), model(x))
    assert counts["host_ops"] == 0


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_products_of_bytes_have_all_their_bits(
    dtype: torch.dtype, dynamic: bool, counts: Counter[str]
) -> None:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1
    weight = torch.randint(-128, 128, (48, 70), dtype=torch.int8)

    def function(*given: torch.Tensor) -> list[list[torch.Tensor]]:
        return [[torch._int_mm(x, weight.T), x.view(torch.int8) @ weight.T] for x in given]

    compiled = torch.compile(function, backend="npu_iree", dynamic=dynamic)
    for sizes in ((20, 33), (33, 20)) if dynamic else ((20, 33),):
        given = [torch.randint(low, high, (rows, 70), dtype=dtype) for rows in sizes]
        assert_same(compiled(*given), function(*given))
    assert counts["host_ops"] == 0


def test_signed_bytes(counts: Counter[str]) -> None:
    x, other, flags = PAIRS[0].view(torch.int8), torch.tensor(301), PAIRS[1] > 100

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            *(x - 1, torch.sub(x, 5, alpha=2), x & other, x ^ other, x | 5, x ^ 5, x >= flags),
            *(x == 300, x <= 200, x < 300, x < other, torch.maximum(x, other), x.clamp(-3, 100)),
            *(torch.where(flags, x, other), torch.where(flags, x, -x)),
            *(torch.cat([x, flags]), torch.cat([x, x])),
        ]

    assert_same(torch.compile(function, backend="npu_iree")(x), function(x))
    assert counts["host_ops"] == 0


@pytest.mark.parametrize(
    "function", [lambda x: x.clamp(5, 300), lambda x: x**300, lambda x: torch.full_like(x, 300)]
)
def test_a_number_that_is_no_byte_is_eagers_error(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(RuntimeError, match="without overflow"):
        torch.compile(function, backend="npu_iree")(BYTES)


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool], ids=str)
def test_sums_are_of_the_dtype_that_is_asked_for(dtype: torch.dtype, counts: Counter[str]) -> None:
    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        rows = [x.sum(1, dtype=dtype) for x in tensors]
        return [*rows, *(x.sum(dtype=dtype) for x in tensors)]

    tensors = [(PAIRS * 3).to(of) for of in (torch.uint8, torch.int8, torch.int64)]
    tensors.append((PAIRS % 64).float())  # what no float is in eight bits differs from CPU to CPU
    found = torch.compile(function, backend="npu_iree")(*tensors)
    assert_same(found, function(*tensors))
    assert counts["host_ops"] == 0


@pytest.mark.parametrize("reduce", ["amax", "amin", "sum", "prod", "mean"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_scattered(reduce: str, dtype: torch.dtype, counts: Counter[str]) -> None:
    def function(x: torch.Tensor, index: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.scatter_reduce(0, index, y, reduce)

    index = torch.arange(PAIRS.shape[1]) % 7
    args = BYTES.to(dtype), index, PAIRS[1].to(dtype)
    assert_same(torch.compile(function, backend="npu_iree")(*args), function(*args))
    assert counts["host_ops"] == 0


def test_padded_by_a_byte(counts: Counter[str]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.pad(x, (1, 2), value=200), F.pad(x, (0, 1))

    assert_same(torch.compile(function, backend="npu_iree")(BYTES), function(BYTES))
    assert counts["host_ops"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["known", "any"])
def test_shifts_by_any_number(dtype: torch.dtype, is_dynamic: bool, counts: Counter[str]) -> None:
    """By less than none of the bits, or all of them, an integer is shifted until it is its sign."""
    bits = torch.iinfo(dtype).bits

    def function(x: torch.Tensor, by: torch.Tensor) -> list[torch.Tensor]:
        numbers = (0, 1, bits - 1, bits, bits + 5, -1)
        shifted = [x << n for n in numbers] + [x >> n for n in numbers]
        return [*shifted, x << by, x >> by, 7 << by, -3 >> by, torch.bitwise_left_shift(x, by)]

    x = torch.tensor([-3, 0, 1, 100, -128, 127, 2 ** (bits - 2), -(2 ** (bits - 2))])
    by = torch.tensor([0, 1, bits - 1, bits, bits + 1, -1, 2, bits - 2])
    args = x.to(dtype), by.to(dtype)
    found = torch.compile(function, backend="npu_iree", dynamic=is_dynamic)(*args)
    assert_same(found, function(*args))
    assert counts["host_ops"] == 0


def test_shifts_by_a_number_that_is_not_known(counts: Counter[str]) -> None:
    def function(x: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x << by, x >> by

    compiled = torch.compile(function, backend="npu_iree", dynamic=True)
    for by in (3, 8, 70):
        for x in (PAIRS, PAIRS.to(torch.int32) - 100):
            assert_same(compiled(x, by), function(x, by))
    assert (counts["graphs"], counts["host_ops"]) == (2, 0)

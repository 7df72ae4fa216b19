"""Ops whose usual lowering is wrong at an edge: integers, scalars, nothing at all, infinity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")

INF = float("inf")
FLOATS = torch.tensor([[0.0, 1.0, 2.5, -1.0], [0.5, -3.0, 7.0, -0.1]])
WHOLE = torch.tensor([[0, 7, -7, 3], [5, -2, 1, 9]])
SCALAR = torch.tensor(3.0)
TRUE = torch.tensor(True)
INDEX = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]])
NOTHING = torch.empty(0, 4)

CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "a mask of bytes": (
        lambda x, m: torch.index_put(x, (m,), SCALAR, accumulate=True),
        (FLOATS, torch.tensor([0, 200], dtype=torch.uint8)),
    ),
    "scattered into one": (
        lambda x, i: (x.scatter(0, i, 3.0), x[0].scatter(0, i[0], 3.0), x.scatter(0, i, x + 1)),
        (torch.ones(1), torch.tensor([0])),
    ),
    "integers that are compared with numbers of more bits": (
        lambda x, y: (x == 65541, x < 40000, x >= 65536, y == 2**32 + 5, y < 2**31, y != -(2**32)),
        (WHOLE.to(torch.int16), WHOLE.to(torch.int32)),
    ),
    "the least integer, divided in more bits": (
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        (torch.tensor([-(2**31), 7], dtype=torch.int32), torch.tensor([-1, 2])),
    ),
    "powers of ten": (
        lambda x: torch.floor(torch.log10(x)),
        (torch.tensor([10.0**power for power in range(-307, 309)], dtype=torch.float64),),
    ),
    "logspace of a negative base": (lambda x: x + torch.logspace(0, 3, 4, -2.0), (FLOATS,)),
    "truncation of doubles": (
        lambda x: torch.div(x, 0.1, rounding_mode="trunc"),
        (torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64),),
    ),
    "the largest so far": (
        lambda x, i: (x.cummax(1), x.cummin(0), i.cummax(-1), i.cummin(1), (x * INF).cummax(1)),
        (FLOATS, WHOLE),
    ),
    "NaN beside whole numbers": (
        lambda x, y: (torch.maximum(x, y), torch.minimum(x, y), torch.clamp(x, y), y.clamp(max=x)),
        (torch.tensor([float("nan"), 5.0, -INF]), torch.tensor([1, 2, 3])),
    ),
    "a truth that is added": (
        lambda x: (x + True, True + x, torch.add(x, True, alpha=False), x + TRUE, x + x, x + 1),
        (FLOATS > 0,),
    ),
    "numbers that are no integers, to integers": (
        lambda x, y: (
            torch.addcmul(x, x, x, value=2.0),
            torch.addcmul(x, x, x, value=0.5),
            torch.addcmul(x, x, y, value=0.5),
        ),
        (WHOLE, FLOATS),
    ),
    "the length of numbers and truths": (torch.hypot, (SCALAR, FLOATS > 0)),
    "results that begin alike": (
        lambda x: (x * 3 + 1, torch.cat([x, x * 2]), torch.cat([x, x * 3]), torch.stack([x, -x])),
        (FLOATS,),
    ),
    "results that begin with the same numbers": (
        lambda x: (
            x * 3 + 1,
            *(torch.cat([torch.zeros(1, 4), y, x]) for y in (x, x * 3, x.sin())),
        ),
        (FLOATS,),
    ),
    "floor division of truths": (lambda x: (x > 1) // 2, (FLOATS,)),
    "angle beside a number of another dtype": (
        lambda y, x: (torch.atan2(y, x), torch.atan2(x, y)),
        (FLOATS, torch.tensor(0.5, dtype=torch.float64)),
    ),
    "indices of 32 bits": (
        lambda x, i: (torch.nn.functional.embedding(i, x), x.index_put((i,), SCALAR)),
        (FLOATS, torch.tensor([1, 0], dtype=torch.int32)),
    ),
    "power of infinity": (lambda x: (x**INF, x**-INF), (FLOATS,)),
    "floor division of floats": (lambda x: torch.floor_divide(x, 0.3), (FLOATS,)),
    "hardtanh of integers": (lambda x: torch.nn.functional.hardtanh(x, -2, 3), (WHOLE,)),
    "logspace of integers": (
        lambda x: x + torch.logspace(0, 4, 4, 5.0, dtype=torch.int64),
        (WHOLE,),
    ),
    "mean of scattered integers": (
        lambda x, i: (
            torch.scatter_reduce(x, 0, i, x, "mean"),
            torch.scatter_reduce(x, 0, i, x, "mean", include_self=False),
        ),
        (WHOLE, INDEX),
    ),
    "variance below its correction": (
        lambda x: (x.var(0, correction=3), torch.var_mean(x[:0]), torch.std(x[:1], 0)),
        (FLOATS,),
    ),
    "scalars along a dimension": (
        lambda x: (x.cumsum(0), x.amax(0), x.argmin(0), x.max(-1), x.softmax(0), x.sort()),
        (SCALAR,),
    ),
    "scalars picked and put": (
        lambda x: (
            x.gather(0, torch.tensor(0)),
            x.index_select(0, torch.tensor([0])),
            x.scatter(0, torch.tensor(0), x * 2),
        ),
        (SCALAR,),
    ),
    "negative floats as unsigned integers": (
        lambda x, y: (x.to(torch.uint8), y.to(torch.uint8), y.double().to(torch.uint8)),
        (FLOATS.bfloat16(), torch.linspace(-300, 300, 37)),
    ),
    "nothing": (
        lambda x, y: (torch.cat([x, y * 2, x]), x.repeat(2, 3), (x @ y.T).sum(), x.view(4, 0)),
        (NOTHING, FLOATS),
    ),
}


FIRSTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "computed": lambda x: x * 2,
    "zeros": lambda x: torch.zeros(2, 3),
    "one row": lambda x: torch.ones(1, 3),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_eager_gives(name: str) -> None:
    function, inputs = CASES[name]
    assert_same(torch.compile(function, backend="npu_iree")(*inputs), function(*inputs))


def test_results_of_any_size_that_begin_alike() -> None:
    def joined(*given: torch.Tensor) -> dict[str, Any]:
        found = dict[str, Any]()
        for (name, first), x in zip(FIRSTS.items(), given, strict=True):
            begin = first(x)
            found[name] = x * 3 + 1, *(torch.cat([begin, y]) for y in (x, x * 3, x.sin(), x))
        return found

    fast = torch.compile(joined, backend="npu_iree", dynamic=True)
    for rows in (5, 2, 9):
        given = [torch.randn(rows, 3) for _ in FIRSTS]
        assert_same(fast(*given), joined(*given))


def test_an_integer_made_of_a_fraction_is_zero() -> None:
    def divided(y: torch.Tensor) -> torch.Tensor:
        return y // torch.full_like(y, 0.5)

    with pytest.raises(ZeroDivisionError):
        torch.compile(divided, backend="npu_iree")(WHOLE)


@pytest.mark.sweep
@pytest.mark.parametrize("window", [(2, 2), (3, 2, 1), (3, 2, 0, 2)])
def test_maxima_of_windows_over_the_end_of_images_of_any_size(
    window: tuple[int, ...], counts: Counter[str]
) -> None:
    def pooled(x: torch.Tensor) -> Any:
        return torch.nn.functional.max_pool2d(x, *window, ceil_mode=True, return_indices=True)

    fast = torch.compile(pooled, backend="npu_iree", dynamic=True)
    for size in (6, 7, 10):
        x = torch.randn(2, 3, size, size + 3)
        x[0, 0, 1, 1], x[0, 1, 4:, 4:] = float("nan"), -INF
        assert_same(fast(x), pooled(x))
    assert not counts["host_ops"]


def test_a_program_of_more_sizes_than_the_runtime_takes_is_cut(counts: Counter[str]) -> None:
    def summed(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        for other in others:
            x = (x + other.size(0)) * 0.5
        return x

    inputs = [torch.randn(size) for size in range(4, 40)]
    fast = torch.compile(summed, backend="npu_iree", dynamic=True)
    assert_same(fast(*inputs), summed(*inputs))
    assert (counts["refused_flags"], counts["host_ops"], counts["regions"]) == (0, 0, 1)


def test_images_of_bytes_are_divided_on_the_device(counts: Counter[str]) -> None:
    image = torch.arange(256, dtype=torch.uint8).view(16, 16)
    inputs = image, torch.flip(image, [0]).clamp_min(1), torch.rand(16, 16).half() + 1

    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        return [x / 255, x / 255.0 - 0.5, x / y, x / z, z / y]

    assert_same(torch.compile(function, backend="npu_iree")(*inputs), function(*inputs))
    assert counts["host_ops"] == 0


def test_an_average_of_all_there_is_runs_on_the_device(counts: Counter[str]) -> None:
    pools = [
        torch.nn.AvgPool2d(20, ceil_mode=True),
        torch.nn.AvgPool2d((7, 2), 1),
        torch.nn.AvgPool2d((10, 9), padding=(2, 0), count_include_pad=False),
    ]

    def average(x: torch.Tensor) -> list[torch.Tensor]:
        return [pool(x.relu()) for pool in pools]

    x = torch.randn(2, 3, 7, 9)
    assert_same(torch.compile(average, backend="npu_iree")(x), average(x))
    assert (counts["regions"], counts["host_ops"]) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_negative_indices_count_from_the_end(dynamic: bool) -> None:
    def write(x: torch.Tensor, i: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        add = torch.ops.aten.index_put.default
        first, whole = x.clone(), x.clone()
        first[i[:2]] = rows[0, 0]
        whole[:, i] = rows
        return [first, whole, add(x, [None, None, i], rows[0, 0, 0], True), x[:, i]]

    x, i, rows = torch.randn(5, 6, 4), torch.tensor([-1, 2, -3]), torch.randn(5, 3, 4)
    compiled = torch.compile(write, backend="npu_iree", dynamic=dynamic)
    assert_same(compiled(x, i, rows), write(x, i, rows))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_a_mask_sets_is_chosen(dynamic: bool, counts: Counter[str]) -> None:
    """On the device, and in eager's strides, whatever those of the mask are."""
    put, mask = torch.ops.aten.index_put.default, torch.rand(3, 4) > 0.5

    def choose(x: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        row = x[0]
        negative, nan = x * 2, x / x.detach()
        negative[negative < 0] = 7
        nan[mask] = float("nan")
        return [
            *(negative, nan, put(x.permute(2, 0, 1), [None, mask], row[:1].T)),
            *(put(x, [mask], row[0]), put(x, [mask], row[:1], True), put(x, [mask[:, 0]], row[0])),
        ]

    def both(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        return [*choose(x, mask), *choose(y, mask)]

    given = torch.randn(3, 4, 5), torch.randn(5, 4, 3).permute(2, 1, 0), mask
    expected = both(*given)
    found = torch.compile(both, backend="npu_iree", dynamic=dynamic)(*given)
    assert_same(found, expected)
    if not dynamic:
        assert [t.stride() for t in found] == [t.stride() for t in expected]
    assert counts["host_ops"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_slices_with_gaps_are_read_by_index(dynamic: bool, counts: Counter[str]) -> None:
    """On the device, with the gaps copied away (`separate_slices`)."""

    def read(x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        pairs, thirds = x.unflatten(1, (-1, 2)), x[:, 1::3]
        columns = [thirds.flip(1) + 1, thirds[:, i], thirds.unsqueeze(1).flip(2), thirds[i, 0]]
        of_pairs = [pairs[..., 0][:, i], pairs[..., 1].flip(0), pairs[:, ::2, :1].flip(1)]
        return [*columns, *of_pairs, thirds.gather(1, i.expand(len(x), len(i)))]

    x, i = torch.randn(6, 12), torch.tensor([2, 0, 1])
    compiled = torch.compile(read, backend="npu_iree", dynamic=dynamic)
    assert_same(compiled(x, i), read(x, i))
    assert counts["host_ops"] == 0


@pytest.mark.slow
def test_the_gradients_of_ormqr_are_eagers() -> None:
    """Of a chain of products, updated slices and columns put together (`separate_pieces`)."""

    def gradients(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        args = [torch.randn(5, 5), torch.randn(5), torch.randn(5, 5)]
        for arg in args:
            arg.requires_grad_()
        function(*args).square().sum().backward()
        return [arg.grad for arg in args if arg.grad is not None]

    def apply(a: torch.Tensor, tau: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.ormqr(a, tau, other, left=True, transpose=True)

    expected, found = gradients(apply), gradients(torch.compile(apply, backend="npu_iree"))
    assert len(found) == 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_variance_of_any_number_of_elements() -> None:
    def spreads(x: torch.Tensor) -> Any:
        return x.var(0, correction=5), x.std(1, correction=2.5), torch.var_mean(x, 0, correction=3)

    fast = torch.compile(spreads, backend="npu_iree", dynamic=True)
    for sizes in ((9, 4), (4, 2), (3, 7)):
        x = torch.randn(sizes)
        assert_same(fast(x), spreads(x))


@pytest.mark.parametrize("op", [torch.max, torch.min])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int8])
def test_nothing_has_no_largest(op: Callable[..., Any], dtype: torch.dtype) -> None:
    fast = torch.compile(lambda x: op(x), backend="npu_iree")
    with pytest.raises(RuntimeError, match="numel"):
        fast(torch.zeros(3, 0, dtype=dtype))


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [False, True])
def test_products_of_three_and_their_gradients(dynamic: bool, counts: Counter[str]) -> None:
    model = torch.nn.Bilinear(3, 4, 5)
    compiled = torch.compile(model, backend="npu_iree", dynamic=dynamic)
    given = [torch.randn(2, 7, n, requires_grad=True) for n in (3, 4)]
    found, expected = (
        torch.autograd.grad(f(*given).square().sum(), (*given, *model.parameters()))
        for f in (compiled, model)
    )
    assert_same(found, expected)
    assert counts["unsupported_ops"] == 0

"""What passes the boundary of a compiled function comes out as in eager.

Longer than a module should be: the table of aliases is one list that is read as one.
"""

from __future__ import annotations

import copy
from collections import Counter, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from npu_iree.border import Crossing, Import, fetch, put_in_place
from npu_iree.device import open_device
from npu_iree.targets import find_target
from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")

Make = Callable[[], tuple[Any, ...]]

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int32,
    torch.int64, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
INTS = [torch.int64, torch.int32, torch.int8, torch.uint8]


def data(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make the same random tensor each time."""
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype) * (
            1 + 1j if dtype.is_complex else 1
        )
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def leaves(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def sharing(tree: Any) -> list[int]:
    """Give each tensor the position of the first one that lies in the same memory."""
    starts = [t.untyped_storage().data_ptr() if t.numel() else id(t) for t in leaves(tree)]
    return [starts.index(s) for s in starts]


def layout(tree: Any) -> list[list[int]]:
    """Give the strides of each tensor, where its shape leaves no choice."""
    return [
        [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] if t.numel() else []
        for t in leaves(tree)
    ]


def overwrite(results: Any) -> None:
    """Write another number into each result, as a caller may."""
    for i, tensor in enumerate(leaves(results)):
        dense = torch._debug_has_internal_overlap(tensor) == 0
        if dense and not tensor.requires_grad and not tensor.is_inference():
            tensor.fill_(i + 2)


def check(
    function: Callable[..., Any], make: Make, target: str, *, calls: int = 2, **how: Any
) -> Callable[..., Any]:
    """Compare compiled calls with eager ones, then overwrite the results and look for traces."""
    compiled = torch.compile(function, backend="npu_iree", options={"target": target}, **how)
    for _ in range(calls):
        ours, eagers = make(), make()
        actual, expected = compiled(*ours), function(*eagers)
        same_state((actual, ours), (expected, eagers))
        assert layout(actual) == layout(expected)
        overwrite(actual)
        overwrite(expected)
        same_state((actual, ours), (expected, eagers))
    return compiled


def same_state(actual: Any, expected: Any) -> None:
    for one, other in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        assert_same(one, other)
    assert pytree.tree_structure(actual) == pytree.tree_structure(expected)
    assert sharing(actual) == sharing(expected)


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Make one tensor of each layout that a caller may bring."""
    flat = data(240, dtype=dtype)
    image = flat.view(2, 5, 4, 6)
    return {
        "contiguous": flat.view(12, 20),
        "misaligned": flat[1:25].view(4, 6),
        "strided": flat[::3],
        "transposed": flat.view(12, 20).t(),
        "permuted": image.permute(2, 0, 3, 1),
        "channels_last": image.to(memory_format=torch.channels_last),
        "sliced": image[:, 1:3, :, 2:],
        "expanded": flat[:6].expand(4, 6),
        "expanded_inside": flat[:6].view(6, 1).expand(6, 5),
        "scalar_view": flat[7],
        "zero_d": flat[3].clone(),
        "empty": flat[:0].view(0, 4),
        "empty_strided": flat.as_strided((0, 3), (1, 5)),
        "ones": flat[:1].view(1, 1, 1),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_layout_of_every_dtype_passes(
    dtype: torch.dtype, target: str, counts: Counter[str]
) -> None:
    def function(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # the compiler crashes on 8-bit products; sums of complex numbers and uint8 are the host's
        if dtype is torch.uint8:
            return {n: t << 1 for n, t in tensors.items()}
        return {n: t * t if t.is_complex() else t + t for n, t in tensors.items()}

    check(function, lambda: (layouts(dtype),), target)
    assert counts["regions"] >= 1


@pytest.mark.parametrize("name", sorted(layouts(torch.float32)))
def test_each_layout_passes_alone(name: str, target: str, counts: Counter[str]) -> None:
    check(lambda x: (torch.relu(x) + 1, x), lambda: (layouts(torch.float32)[name],), target)
    assert counts["regions"] >= (not name.startswith("empty"))


def test_a_default_device_is_for_the_users_own_tensors(target: str) -> None:
    x, empty = torch.randn(8, 12)[:, ::2], torch.ones(0, 3)
    compiled = torch.compile(
        lambda x, empty: (x * 2, empty + 1), backend="npu_iree", options={"target": target}
    )
    with torch.device("meta"):
        results = compiled(x, empty)
    assert_same(results, (x * 2, empty))


def test_an_empty_tensor_of_any_strides_goes_in_and_out(target: str) -> None:
    device = open_device(find_target(target))
    empty = torch.empty_strided((0, 3), (1, 5))
    crossing = Crossing.of("x", (0, 1))
    array = put_in_place(device, empty, crossing, [])
    (back,) = fetch(device, [array], [crossing], "a test", [])
    assert_same(back, empty)


def test_zeros_without_memory_go_in_again_and_again(target: str) -> None:
    device, imported = open_device(find_target(target)), list[torch.Tensor]()
    zeros = torch._efficientzerotensor(32)[16:]  # its place would be one that is in line
    known = Import(device, Crossing.of("zeros", (0,)), is_given=False)
    arrays = [known.put(zeros, imported) for _ in range(4)]
    for array in arrays:
        assert_same(array.to_host(timeout_s=5), torch.zeros(16))


def test_one_compile_serves_every_alignment(target: str, counts: Counter[str]) -> None:
    base = data(400)
    compiled = torch.compile(lambda x: x.sin() + x, backend="npu_iree", options={"target": target})
    for offset in range(6):
        x = base[offset : offset + 24].view(4, 6)
        assert_same(compiled(x), x.sin() + x)
    assert counts["graphs"] == 1


def test_float64_keeps_digits_that_float32_loses(any_target: str, counts: Counter[str]) -> None:
    x = torch.tensor([1 + 2**-40, 1e300, -1e-300, 3.0], dtype=torch.float64)
    compiled = check(lambda x: (x - 1, x * 2, x + 1e-12), lambda: (x.clone(),), any_target)
    assert compiled(x)[0][0].item() == 2**-40
    assert counts["regions"] >= 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_inf_and_minus_zero_pass(
    dtype: torch.dtype, any_target: str, counts: Counter[str]
) -> None:
    inf = float("inf")

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([float("nan"), inf, -inf, -0.0, 0.0, 1.5, -2.5], dtype=dtype)
        return x, x.flip(0)

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        signs = 1 / (x * 1)
        values = x + y, x * y, torch.maximum(x, y), torch.relu(x), x.clamp(-1, 1), x.round()
        return *values, signs, x == y, x < y, x.isnan(), x.sign(), torch.where(x > 0, x, y), -x

    check(function, make, any_target)
    assert counts["regions"] >= 1


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers_wrap_and_round_as_in_eager(
    dtype: torch.dtype, any_target: str, counts: Counter[str]
) -> None:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([low, high, high - 1, 7, 100, low + 1], dtype=dtype)
        return x, torch.tensor([3, 2, 5, 2, 3, 7], dtype=dtype)

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        divided = torch.div(x, y, rounding_mode="floor"), torch.div(x, y, rounding_mode="trunc")
        compared = x < y, torch.maximum(x, y), x.clamp(min=5), x.abs()
        return x + y, x - y, x * y, -x, x & y, x | y, x ^ y, ~x, x % y, *divided, *compared

    check(function, make, any_target)
    assert counts["regions"] >= 1


def test_integers_beyond_32_bits_stay_exact(any_target: str, counts: Counter[str]) -> None:
    x = torch.tensor([2**31, 2**53 + 1, -(2**62) - 1, 2**63 - 1])
    check(lambda x, n: (x + 1, x * 3, x + n, x.sum()), lambda: (x.clone(), 2**40 + 1), any_target)
    assert counts["regions"] >= 1


def test_mixed_dtypes_promote_as_in_eager(any_target: str, counts: Counter[str]) -> None:
    def make() -> tuple[torch.Tensor, ...]:
        return tuple(data(4, dtype=t) for t in DTYPES[:-1])

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        zero_d = tensors[3][0]
        return [a + b for a in tensors for b in tensors[:5]] + [t * zero_d for t in tensors]

    check(function, make, any_target)
    assert counts["regions"] >= 1


def test_bool_logic_passes(any_target: str, counts: Counter[str]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x & y, x | y, x ^ y, ~x, x.any(), x.all(), x.sum(), x + y, x * y, x == y, x.any(0)

    check(function, lambda: (data(3, 5, dtype=torch.bool), data(5, dtype=torch.bool)), any_target)
    assert counts["regions"] >= 1


def test_lazy_conjugates_and_negatives_pass(target: str, counts: Counter[str]) -> None:
    def make() -> tuple[torch.Tensor, ...]:
        z = data(3, 4, dtype=torch.complex64)
        return z.conj(), z.conj().t(), z.conj().imag, z

    def function(conj: Any, adjoint: Any, neg: Any, z: Any) -> Any:
        return conj * z, adjoint * adjoint, neg * neg, neg, z.conj(), torch.view_as_real(z) * 2

    assert make()[2].is_neg()
    check(function, make, target)
    assert counts["regions"] >= 1


def test_large_tensors_pass(target: str, counts: Counter[str]) -> None:
    check(lambda x: (x + x.t(), x.amax(0)), lambda: (data(2000, 2000),), target)
    assert counts["regions"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dynamic", "target"),
    [
        (None, "npu-local"),
        (True, "npu-virtual"),
        pytest.param(False, "npu-local", marks=pytest.mark.sweep),
        pytest.param(True, "npu-local", marks=pytest.mark.sweep),
        pytest.param(None, "npu-virtual", marks=pytest.mark.sweep),
        pytest.param(False, "npu-virtual", marks=pytest.mark.sweep),
    ],
)
def test_python_scalars_may_change_between_calls(dynamic: bool | None, target: str) -> None:
    def function(x: torch.Tensor, n: int, f: float, flag: bool) -> Any:
        return x * f + n, n, f, flag, x.double() * f, (x if flag else -x) * 2, n + 1, f * 2

    options = {"target": target}
    compiled = torch.compile(function, backend="npu_iree", options=options, dynamic=dynamic)
    for n, f, flag in [
        (2, 0.1, True),
        (3, 1e-3, True),
        (0, -0.0, False),
        (-7, 1e30, True),
        (1, 0.7, False),
    ]:
        args = data(3, 4), n, f, flag
        assert_same(compiled(*args), function(*args))
    with pytest.raises(OverflowError):
        function(data(3, 4), 2**70, f, flag)
    if dynamic is not False:  # a constant is Dynamo's to refuse
        with pytest.raises(OverflowError, match=f"{2**70} is too big"):
            compiled(data(3, 4), 2**70, f, flag)


def test_a_function_of_numbers_alone_passes(any_target: str) -> None:
    compiled = torch.compile(
        lambda n: (torch.arange(n) * 2 + 1, torch.full((2,), n) + 1, n), backend="npu_iree",
        options={"target": any_target}, dynamic=True,
    )  # fmt: skip
    for n in (3, 5, 0, 1):
        assert_same(compiled(n), (torch.arange(n) * 2 + 1, torch.full((2,), n) + 1, n))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [[(4, 3), (7, 5), (1, 5), (4, 1), (0, 3), (2, 0)], [(0, 2), (3, 2), (4, 1)], [(1, 1), (5, 6)]],
)
def test_symbolic_sizes_change_between_calls(
    sizes: list[tuple[int, int]], target: str, counts: Counter[str]
) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        n, m = x.shape
        z = torch.relu(x) @ y
        return (
            z + n,
            x.reshape(-1) * 2,
            n * m,
            x.sum(0),
            y.t() + x,
            torch.cat([x, x * 2]),
            (x + 1).t(),
        )

    options = {"target": target}
    compiled = torch.compile(function, backend="npu_iree", options=options, dynamic=True)
    for n, m in sizes:
        args = data(n, m), data(m, n)
        actual, expected = compiled(*args), function(*args)
        assert_same(actual, expected)
        assert layout(actual) == layout(expected)
    assert counts["host_ops"] == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_product_over_nothing_is_zeros(
    dynamic: bool, any_target: str, counts: Counter[str]
) -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        return torch.addmm(z, x, y), torch.bmm(x.expand(2, *x.shape), y.expand(2, *y.shape)) + 1

    check(function, lambda: (data(3, 0), data(0, 4), data(4)), any_target, dynamic=dynamic)
    assert (counts["regions"], counts["host_ops"]) == (1, 0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_written_at_no_place_is_as_it_was(dynamic: bool, counts: Counter[str]) -> None:
    def function(x: torch.Tensor, given: torch.Tensor, i: torch.Tensor) -> Any:
        y, rows = x.exp(), i[:, 0]
        return [
            *(y.scatter(0, i, given), y.scatter(0, i, 2.0), y.scatter_add(1, i.t()[:3], y)),
            *(y.scatter_reduce(0, i, given, "mean"), y.index_put((rows, rows), x[0, 0])),
            *(y.index_add(0, rows, given), y.index_fill(1, rows, 3.0)),
        ]

    args = data(3, 4), data(0, 4), torch.zeros(0, 4, dtype=torch.int64)
    compiled = torch.compile(function, backend="npu_iree", dynamic=dynamic)
    assert_same(compiled(*args), function(*args))
    assert (counts["regions"], counts["host_ops"]) == (1, 0)


def test_symbolic_strides_and_offsets_pass(any_target: str) -> None:
    def function(x: torch.Tensor) -> Any:
        return x * x.shape[1], x.t() + 1, x.shape, x[1:] * 2

    compiled = torch.compile(
        function, backend="npu_iree", options={"target": any_target}, dynamic=True
    )
    base = data(20, 30)
    for x in (base[2:7, 3:9], base.t()[1:5, :8], base[::2, ::3], base[:3].contiguous()):
        assert_same(compiled(x), function(x))


def in_place_on_a_view(x: torch.Tensor) -> Any:
    x[1:, 2].mul_(3).add_(1)
    return x * 2


def in_place_on_two_views(x: torch.Tensor, y: torch.Tensor) -> Any:
    y.add_(1)
    z = x + y
    x.mul_(z)
    return z, y * 2


def new_values_everywhere(x: torch.Tensor) -> Any:
    y = x + 1
    x.copy_(y)
    x.t_()
    return y, x[0], x.relu_()


def views_that_the_device_reads(x: torch.Tensor) -> Any:
    y = x + 1
    a, b = y.split(2)
    return y, y[1:3], y[1:3] * 2, a, b * 2


def all_places_replaced(x: torch.Tensor, y: torch.Tensor) -> Any:
    s = y.view(2, 10) + 1
    new = torch.as_strided_scatter((x * 2).view(-1), s, (2, 10), (10, 1), 0)
    return new, s, torch.as_strided_scatter((x * 3).view(-1), y.view(2, 10), (2, 10), (10, 1), 0)


def views() -> tuple[torch.Tensor, ...]:
    base = data(40)
    return base[1:21].view(4, 5), base[17:37].view(4, 5)


def one() -> tuple[torch.Tensor]:
    return (data(4, 5),)


def twice() -> tuple[torch.Tensor, torch.Tensor]:
    return one() * 2


def image() -> tuple[torch.Tensor]:
    return (data(2, 3, 4, 5).to(memory_format=torch.channels_last),)


def whole() -> tuple[torch.Tensor]:
    return (data(4, 5, dtype=torch.int64),)


CONSTANT = torch.arange(20.0).view(4, 5)
# fmt: off
ALIASES: dict[str, tuple[Callable[..., Any], Make]] = {
    "inputs_as_they_are": (lambda x, y: (x, y, x + y, x), views),
    "one_input_twice": (lambda x, y: (x + y, x, y), twice),
    "one_input_twice_changed": (lambda x, y: (x.add_(1), y * 2), twice),
    "views_of_one_base": (lambda x, y: (x + y, x.t(), y[0], x.view(-1)), views),
    "views_of_one_base_changed": (in_place_on_two_views, views),
    "view_changed": (in_place_on_a_view, one),
    "metadata_changed": (new_values_everywhere, one),
    "channels_last_changed": (lambda x: (x.relu_(), x + 1), image),
    "misaligned_changed": (lambda x, y: (x.mul_(x), x[1:]), views),
    "views_of_a_result": (lambda x: (lambda y: (y, y.t(), y[1], y.view(-1)))(x + 1), one),
    "views_that_the_device_reads": (views_that_the_device_reads, one),
    "result_twice": (lambda x: (lambda y: (y, y, [y]))(x + 1), one),
    "clones": (lambda x: (x.clone(), x.clone(), x + 1), one),
    "clones_of_a_result": (lambda x: (lambda y: (y, y.clone(), y.clone()))(x + 1), one),
    "moves_of_a_result": (lambda x: (lambda y: (y, y.t().contiguous().t(), y + y))(x * 2), one),
    "a_copy_in_another_order": (lambda x: (x.t().contiguous(), x.t().clone(), x * 2), one),
    "equal_expressions": (lambda x: (x + 1, x + 1, (x + 1).t()), one),
    "identities": (lambda x: (x * 1, x + 0, x / 1, x**1, x - 0), one),
    "negations": (lambda x: (x.neg().neg(), x.relu().relu(), x.relu(), torch.maximum(x, x)), one),
    "integers": (lambda x: (x + 0, x * 1, x | x, x & x, x | 0), whole),
    "conversions": (lambda x: (x.float(), x.double().float(), x.double() + 1, x.contiguous()), one),
    "constants": (lambda x: (x + CONSTANT, CONSTANT.clone(), torch.ones(3), torch.ones(3)), one),
    "slices_put_together": (lambda x: (torch.cat([x[:2], x[2:]]), torch.cat([x]), x + 1), one),
    "sorted": (lambda x: x.sort(0), one),
    "scattered": (lambda x: x.index_put((torch.tensor([0, 2]),), torch.ones(2, 5)), one),
    "slice_replaced": (lambda x: torch.slice_scatter(x, torch.ones(2, 5), 0, 1, 3), one),
    "all_replaced": (lambda x, y: torch.slice_scatter(x, y).view(-1), twice),
    "all_places_replaced": (all_places_replaced, twice),
    "row_replaced": (lambda x: torch.select_scatter(x, x[0] + 1, 0, 2), one),
}
# fmt: on


@pytest.mark.parametrize("name", ALIASES)
def test_results_and_arguments_share_memory_as_in_eager(name: str, target: str) -> None:
    function, make = ALIASES[name]
    before = CONSTANT.clone()
    check(function, make, target)
    assert_same(CONSTANT, before)


@pytest.mark.parametrize("dynamic", [False, True])
def test_results_repeat_their_elements_in_one_place(dynamic: bool, target: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.mul_(2).expand(3, *x.shape), (y + 1).sum(0).view(1, -1).expand(7, -1)

    compiled = torch.compile(
        function, backend="npu_iree", dynamic=dynamic, options={"target": target}
    )
    for _ in range(2):
        ours, eagers = (data(4, 5), data(4, 5)), (data(4, 5), data(4, 5))
        actual, expected = compiled(*ours), function(*eagers)
        same_state((actual, ours), (expected, eagers))
        assert layout(actual) == layout(expected)


def test_a_region_leaves_the_values_that_others_read(any_target: str, counts: Counter[str]) -> None:
    def function(x: torch.Tensor) -> Any:
        values = x.sort(0).values
        mean = torch.linalg.inv(values[:4, :4] + torch.eye(4)).mean()
        return (x + mean).sort(0).values, x * mean

    def from_region_to_region(x: torch.Tensor) -> Any:
        y = x + 1
        mean = torch.linalg.inv(y[:4, :4]).mean()
        return (y * mean).sort(0).values, y.sort(1).values, y

    for each in (function, from_region_to_region):
        check(each, one, any_target)
    assert counts["regions"] >= 3


def test_weights_that_are_slices_are_read_where_they_lie(target: str) -> None:
    base = data(100)
    module = nn.Linear(4, 4, bias=False)
    compiled = torch.compile(module, backend="npu_iree", options={"target": target})
    with torch.no_grad():
        for start in (3, 16, 40):
            module.weight.data = base[start : start + 16].view(4, 4)
            assert_same(compiled(data(2, 4)), module(data(2, 4)))


Pair = namedtuple("Pair", "left right")


def test_nested_results_and_nones_keep_their_structure(
    any_target: str, counts: Counter[str]
) -> None:
    def function(tree: dict[str, Any], nothing: None) -> Any:
        y = tree["x"] + tree["more"][1]
        return {"y": y, "n": None, "l": [y * 2, (3, "text", nothing)], "p": Pair(y, None), "e": ()}

    check(function, lambda: ({"x": data(3), "more": [None, data(3)]}, None), any_target)
    assert counts["regions"] == 1


class Counting(nn.Module):
    """A module that keeps state in buffers and hands out its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        y = self.norm(self.linear(x))
        self.total.copy_(self.total * 0.5 + y.detach().sum(0))
        return y * self.calls, self.linear.weight.clone(), self.linear.weight, self.total.clone()


@pytest.mark.parametrize(
    ("train", "grad"),
    [
        (True, True),
        pytest.param(True, False, marks=pytest.mark.sweep),
        pytest.param(False, True, marks=pytest.mark.sweep),
        (False, False),
    ],
)
def test_buffers_are_mutated_and_clones_of_weights_are_fresh(
    train: bool, grad: bool, any_target: str, counts: Counter[str]
) -> None:
    ours, eagers = Counting().train(train), Counting().train(train)
    compiled = torch.compile(ours, backend="npu_iree", options={"target": any_target})
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            actual, expected = compiled(data(5, 4)), eagers(data(5, 4))
            assert_same(actual, expected)
            assert actual[2] is ours.linear.weight
            for _, fresh, _, total in (actual, expected):
                fresh.data.fill_(9)
                total.fill_(9)
            assert_same(list(ours.state_dict().values()), list(eagers.state_dict().values()))
    assert counts["graphs"] == 1
    assert counts["regions"] >= 1


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_training_run_equals_eager(dynamic: bool, target: str, counts: Counter[str]) -> None:
    torch.manual_seed(1)
    ours = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    eagers = copy.deepcopy(ours)
    compiled = torch.compile(ours, backend="npu_iree", options={"target": target}, dynamic=dynamic)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, eagers)]
    for _ in range(3):
        inputs = [data(5, 6).requires_grad_() for _ in range(2)]
        for model, x, optimizer in zip((compiled, eagers), inputs, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 2, 0, 1])).backward()
            optimizer.step()
        assert_same(inputs[0].grad, inputs[1].grad)
        for one, other in zip(ours.parameters(), eagers.parameters(), strict=True):
            assert_same(one.grad, other.grad)
            assert_same(one, other)
    assert counts["regions"] >= 2


def test_gradients_reach_only_the_inputs_that_ask(any_target: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor, n: torch.Tensor) -> Any:
        return x * y + n, y.t() * 2, x.detach() * 3, n + 1

    compiled = torch.compile(function, backend="npu_iree", options={"target": any_target})
    grads = []
    for call in (compiled, function):
        x, y, n = data(4, 4).requires_grad_(), data(4, 4).t().requires_grad_(), torch.arange(4)
        a, b, c, d = call(x, y, n)
        (a.sum() + (b * b).sum()).backward()
        assert x.grad.stride() == x.stride()
        assert [c.requires_grad, d.requires_grad] == [False, False]
        grads.append([x.grad, y.grad, a, b, c, d])
    assert_same(*grads)


STORAGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "argument": lambda x: x.as_strided((2, 3), (6, 1), 8) + 1,
    "transposed argument": lambda x: x.t().as_strided((5,), (1,), 3) + 1,
    "transposed": lambda x: (x * 2).t().as_strided((5,), (1,), 1) + 1,
    "sliced": lambda x: (x * 2)[1:, 2:].as_strided((5,), (1,), 0) + 1,
    "expanded": lambda x: (x[:1] * 2).expand(4, 6).as_strided((5,), (1,), 1) + 1,
    "overlapping": lambda x: (x * 2).as_strided((3, 4), (2, 1), 1) + 1,
    "of another layout": lambda x: (x.t() * 2).as_strided((5,), (1,), 0) + 1,
    "written in part": lambda x: (x * 2).as_strided_scatter(x[:2, :2], (2, 2), (6, 1), 7) + 1,
    "beside another piece": lambda x: (lambda a, b: a.as_strided((5,), (1,), 1) + b[0, :5])(
        *(x * 2).split(2)
    ),
    "channels-last": lambda x: (
        (x.reshape(1, 2, 3, 4) * 2)
        .to(memory_format=torch.channels_last)
        .as_strided((7,), (1,), 0)
        .tanh()
    ),
}


@pytest.mark.parametrize("options", [{}, {"disabled_ops": ["as_strided"]}], ids=str)
@pytest.mark.parametrize("name", STORAGE)
def test_as_strided_reads_the_memory_that_eager_reads(name: str, options: dict[str, Any]) -> None:
    """Wherever in memory an argument begins: neither guards nor shapes tell."""
    function = STORAGE[name]
    compiled = torch.compile(function, backend="npu_iree", options=options)
    for start in (0, 3, 8):
        x = data(40)[start : start + 24].reshape(4, 6)
        assert_same(compiled(x), function(x))


def test_as_strided_of_memory_at_other_places_is_another_program() -> None:
    """The cache is shared: what one has compiled, the next one finds."""
    functions = [
        lambda x: (x * 2)[1:].as_strided((4,), (1,), 2),
        lambda x: (x * 2)[:-1].as_strided((4,), (1,), 2),
        lambda x: (x.t() * 2).as_strided((4,), (1,), 2),
        lambda x: (x * 2).t().as_strided((4,), (1,), 2),
    ]
    x = data(8, 8)
    for function in functions:
        assert_same(torch.compile(function, backend="npu_iree")(x), function(x))

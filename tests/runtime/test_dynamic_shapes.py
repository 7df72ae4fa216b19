"""One compile serves all sizes: through transformers with a host op, and at every edge."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")

VOCABULARY = 64
# 20 shapes (batch, sequence); the first two differ, so that no size is taken for a constant.
SHAPES = [(2, 8), (3, 11), *itertools.product((2, 3, 5), (4, 7, 9, 13, 16, 31))]
HOST_OP = ["aten.sigmoid"]  # in Llama's SiLU and in our head


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.BertModel(config)


class WithHostOp(nn.Module):
    """A model with an op in it that the target is told not to run: first, last, and in between."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids=tokens)[0]
        return torch.sigmoid(hidden * 2) + tokens.shape[1]


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["dynamic", "marked", "automatic"])
@pytest.mark.parametrize("build", [llama, bert], ids=["llama", "bert"])
def test_twenty_shapes_take_one_compile(
    build: Callable[[], nn.Module], how: str, cold_counts: Counter[str]
) -> None:
    torch.manual_seed(0)
    model = WithHostOp(build()).eval()
    compiled = torch.compile(
        model, backend="npu_iree", dynamic=True if how == "dynamic" else None,
        options={"disabled_ops": HOST_OP},
    )  # fmt: skip
    compiles = []
    for shape in SHAPES:
        tokens = torch.randint(0, VOCABULARY, shape)
        if how == "marked":
            for dim in (0, 1):
                torch._dynamo.mark_dynamic(tokens, dim)
        with torch.no_grad():
            assert_same(compiled(tokens), model(tokens))
        compiles.append(cold_counts["compiles"])
    assert len(SHAPES) == 20
    assert cold_counts["host_ops"] >= 1
    settled = 1 if how == "automatic" else 0  # the first size is taken for a constant there
    assert cold_counts["graphs"] == settled + 1
    assert len(set(compiles[settled:])) == 1


@pytest.mark.sweep
def test_training_takes_one_compile_for_all_shapes(counts: Counter[str]) -> None:
    torch.manual_seed(0)
    model = WithHostOp(bert()).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    compiled = torch.compile(
        model, backend="npu_iree", dynamic=True, options={"disabled_ops": HOST_OP}
    )
    for shape in SHAPES[:6]:
        tokens = torch.randint(0, VOCABULARY, shape)
        outcomes = []
        for call in (compiled, model):
            model.zero_grad()
            loss = call(tokens).pow(2).mean()
            loss.backward()
            outcomes.append([loss.detach(), *(p.grad for p in model.parameters())])
        assert_same(*outcomes)
    assert counts["graphs"] == 2, "one forward, one backward"


def data(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def several(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    """Three symbols, sums, products and quotients of them, and a host op in the middle."""
    (a, b), c = x.shape, z.shape[0]
    joined = torch.cat([x, y.t()], 1)
    halves = torch.linalg.vector_norm(joined, dim=1).view(-1, 1)
    wide = torch.median(joined, dim=1).values.repeat(2)
    grid = (x.unsqueeze(-1) * z).reshape(a, b * c)
    return joined * halves, wide, grid[:, : b * c // 2 + 1], grid.new_zeros(2 * a + 1, c - 1), a * c


def only_in_expressions(x: torch.Tensor) -> Any:
    """Sizes `2*s0 + 1` and `s0//2` are nobody's dimension before they are made."""
    n = x.shape[0]
    padded = torch.nn.functional.pad(x, (0, 0, 0, n + 1))
    return padded * 2, torch.arange(2 * n + 1), padded[: n // 2].sum(0), x.new_full((n // 2,), 3.0)


def of_size(x: torch.Tensor) -> Any:
    """The size is data, too."""
    n = x.shape[0]
    return x / n, x * (n > 5), torch.full((2,), n), torch.median(x) * n, x.mean(0)


def across(x: torch.Tensor) -> Any:
    """Views, splits and shifts."""
    first, second = x.chunk(2, 0)
    return first.t(), second.flatten() + 1, x.roll(1, 0), x.flip(1), x.unfold(1, 2, 1).sum(-1)


def odd(x: torch.Tensor) -> Any:
    """The argument's own size is an expression of a symbol."""
    return (x[:-1].reshape(2, -1) * 2, x[::2], x.shape[0] // 2)


def indexed(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    """Reads and writes through indices of one and more dimensions, which are dynamic, too."""
    (a, b), c = x.shape, z.shape[0]
    grid = (torch.arange(a * c).view(a, c) * 7) % b
    cube = x.new_zeros(a, b, c)
    column = torch.arange(c) % b
    return (
        torch.zeros(9, c).index_put((grid % 9,), z + x[0, 0], accumulate=True),
        torch.zeros(9, 9).index_put((grid % 9, (grid + a) % 9), z, accumulate=True),
        cube.index_put((torch.tensor([0]), column[:1]), z),
        cube.index_copy(1, torch.arange(b).flip(0), x.unsqueeze(-1) * z),
        cube.index_add(1, column, y.t().unsqueeze(-1).expand(a, c, c)),
        x[:, column] * 2,
        x[grid % a, grid % b],
        x.gather(1, grid % b),
        x.scatter_add(1, grid % b, y.t()),
    )


def sizes_for_tensors(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Ops of tensors get sizes, and indices that were divided by some."""
    places = torch.arange(x.shape[0] * 3)
    return (
        x.shape[0] - y,
        torch.div(x.shape[0], 2, rounding_mode="trunc") * y,
        x[places // 3 % x.size(0)],
        places % x.shape[0],
        torch.ones(x.shape[1] % 4 + 2) * y[0],
        torch.cat([x, x], 1).view(x.shape[0], 2, -1) * 2,
    )


def permuted_back(x: torch.Tensor) -> Any:
    """Sorting begins with the numbers from 0 on, which are written to another place, too."""
    keys, places = torch.sort(x.reshape(-1))
    back = torch.empty_like(places)
    back[places] = torch.arange(places.size(0))
    return keys, back


def grouped_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """The last size is a symbol that becomes a number where the product is formed."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True, enable_gqa=True)


def scanned(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Scans, sorts and scatters, where a part of what they read or make has no place in memory."""
    grid = x[:, None, None, :, None] * y
    places = torch.argsort(y, stable=True)
    least = torch.zeros(5).scatter_reduce(0, places % 5, y, "amin", include_self=False)
    pad = torch.nn.functional.pad
    return (
        grid.cumsum(-2),
        grid.cumprod(0),
        places,
        least,
        pad(x.cumsum(1), (1, 0)),
        pad((x * 2).cumsum(1), (1, 0)),
    )


def cut_anywhere(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    """Rows that are cut at a computed place, beside others, and beside a norm."""
    cube, mask = x.unsqueeze(-1) * z, (torch.cat([x, y.t()], 1) > 0)[:, -x.shape[1] :, None]
    norm = cube * torch.rsqrt(cube.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (norm * mask) @ z, (x[:, 1:] - x[:, :-1] != 1).cumsum(-1)


def read_by_several(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    """Indices that have to be broadcast, count from the end, and are of two kinds."""
    (a, b), c = x.shape, z.shape[0]
    rows, columns = torch.arange(a), torch.arange(-c, 0) % b - b
    cube = x.unsqueeze(-1) * z
    return (
        x[rows[:, None], columns],
        cube[rows % a, rows.int() % b],
        cube[:, rows % b, rows % c],
        cube[rows, :, rows % c],
        cube[rows[:, None] - a, columns, (columns % c)[None]],
    )


def diagonals(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Diagonals, read and written, of values that have more rows than columns, or fewer."""
    grid = x.unsqueeze(-1) * y
    grid.diagonal(0, 0, 2).mul_(2)
    return (
        grid,
        x.diagonal_scatter(x.diagonal().exp()),
        grid.diagonal_scatter(grid.diagonal(-1, 1, 2) + 1, -1, 1, 2),
    )


def padded_to_fit(x: torch.Tensor, y: torch.Tensor) -> Any:
    """What is added is negative for some sizes: then it is taken away."""
    more, pad = y.shape[0] - x.shape[0] + 1, torch.nn.functional.pad
    return (
        pad(x, (0, 0, 0, more)),
        pad(x * 2, (1, 0, more, 0), value=3.0),
        pad(x.sin(), (0, 1, -more, more)),
    )


# sizes that no expression above makes 0 or 1: PyTorch compiles those apart
SIZES = [(4, 3, 5), (7, 5, 6), (6, 8, 4), (8, 9, 3)]
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[int, int, int], tuple[Any, ...]]]] = {
    "several symbols": (several, lambda a, b, c: (data(a, b), data(c, a), data(c))),
    "only in expressions": (only_in_expressions, lambda a, b, c: (data(a, b),)),
    "indexed": (indexed, lambda a, b, c: (data(a, b), data(c, a), data(c))),
    "of size": (of_size, lambda a, b, c: (data(a, b),)),
    "across": (across, lambda a, b, c: (data(2 * a, b),)),
    "odd": (odd, lambda a, b, c: (data(2 * a + 1),)),
    "sizes for tensors": (sizes_for_tensors, lambda a, b, c: (data(a, b), data(c))),
    "permuted back": (permuted_back, lambda a, b, c: (data(a, b),)),
    "scanned": (scanned, lambda a, b, c: (data(a, b), data(c))),
    "cut anywhere": (cut_anywhere, lambda a, b, c: (data(a, b), data(c, a), data(c))),
    "read by several": (read_by_several, lambda a, b, c: (data(a, b), data(c, a), data(c))),
    "diagonals": (diagonals, lambda a, b, c: (data(a, b), data(c))),
    "padded to fit": (padded_to_fit, lambda a, b, c: (data(a, b), data(c))),
    "grouped attention": (
        grouped_attention,
        lambda a, b, c: tuple(data(a, b, heads, 16).transpose(1, 2) for heads in (22, 11, 11)),
    ),
    "a number": (lambda x, n: (x * n, torch.arange(n) + n), lambda a, b, c: (data(a, b), c)),
}


WITH_HOST_OPS = ["several symbols", "of size"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_symbols_and_expressions_of_them(name: str, any_target: str, counts: Counter[str]) -> None:
    function, make = FUNCTIONS[name]
    options = {"target": any_target, "fallback": "host" if name in WITH_HOST_OPS else "error"}
    compiled = torch.compile(function, backend="npu_iree", dynamic=True, options=options)
    for sizes in SIZES:
        args = make(*sizes)
        assert_same(compiled(*args), function(*args))
    assert counts["graphs"] == 1


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "merged": lambda x: x.transpose(1, 2).reshape(x.shape[0] * 4, x.shape[1], 8),
    "merged and split": lambda x: x.permute(0, 2, 3, 1).reshape(x.shape[0], 4, 2, 4, -1),
    "expanded": lambda x: x[0].unsqueeze(0).expand(3, -1, -1, -1).flatten(2),
    "sliced": lambda x: x[:, 1:].flatten(2),
}


@pytest.mark.parametrize("is_transposed", [False, True], ids=["dense", "transposed"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_an_argument_is_the_same_view(name: str, is_transposed: bool) -> None:
    function = VIEWS[name]
    compiled = torch.compile(function, backend="npu_iree", dynamic=True)
    for a, b, _ in SIZES:
        x = data(b, a, 4, 8).transpose(0, 1) if is_transposed else data(a, b, 4, 8)
        view, expected = compiled(x), function(x)
        assert_same(view, expected)
        assert view.stride() == expected.stride()
        assert torch._C._is_alias_of(view, x) == torch._C._is_alias_of(expected, x)


def test_the_larger_and_the_smaller_of_two_sizes() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        larger, smaller = max(x.shape[0], y.shape[0]), min(x.shape[0], y.shape[0])
        return torch.zeros(larger, smaller) + x.sum(), x[:smaller] * larger

    options = {"fallback": "error"}
    compiled = torch.compile(function, backend="npu_iree", dynamic=True, options=options)
    for a, b, c in SIZES:
        args = data(a, b), data(c)
        assert_same(compiled(*args), function(*args))


@pytest.mark.parametrize(
    "name",
    [
        "only in expressions",
        pytest.param("several symbols", marks=pytest.mark.sweep),
        pytest.param("of size", marks=pytest.mark.sweep),
    ],
)
def test_sizes_0_and_1_are_right_whether_they_come_first_or_last(name: str) -> None:
    function, make = FUNCTIONS[name]
    edges = [(1, 3, 5), (4, 1, 5)]
    edges += [(0, 3, 5)] if name == "only in expressions" else []  # eager has no median of nothing
    for order in (edges, [SIZES[0], *edges[::-1]]):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="npu_iree", dynamic=True)
        for sizes in order:
            args = make(*sizes)
            assert_same(compiled(*args), function(*args))


def test_a_marked_dimension_may_be_one_or_nothing(any_target: str, counts: Counter[str]) -> None:
    """What is marked unbacked is never taken for a constant, not even if it is 0 or 1."""
    layer = nn.Linear(3, 4)

    def function(x: torch.Tensor) -> Any:
        return torch.relu(layer(x)) * 2, x.sum(0), torch.cat([x, x.new_ones(2, 3)]).exp()

    compiled = torch.compile(function, backend="npu_iree", options={"target": any_target})
    with torch.no_grad():
        for size in (1, 4, 0, 3, 0):
            x = data(size, 3)
            torch._dynamo.decorators.mark_unbacked(x, 0)
            assert_same(compiled(x), function(x))
    assert counts["graphs"] == 1


def nonzeros(x: torch.Tensor) -> Any:
    found = torch.nonzero(x > 0)
    return found * 2 + 1, x[found[:, 0], found[:, 1]].exp()


def masked(x: torch.Tensor) -> Any:
    chosen = x[x > 0.5]
    return chosen * 2, chosen.sum(), torch.relu(x) + chosen.numel()


def unique(x: torch.Tensor) -> Any:
    values, counts = torch.unique(x.round(), return_counts=True)
    return values + 1, counts.float() / x.numel()


def item(x: torch.Tensor) -> Any:
    n = int((x > 0).sum().item())
    return torch.arange(n) + 1, x * n


def by_mask(x: torch.Tensor) -> Any:
    y = x.clone()
    y[y < 0] = 0.5
    return y * 2, torch.masked_select(x, x > 0) + 1


DATA_DEPENDENT = [nonzeros, masked, unique, item, by_mask]


@pytest.mark.parametrize("captured", [False, True], ids=["graph breaks", "captured"])
@pytest.mark.parametrize("function", DATA_DEPENDENT)
def test_sizes_that_depend_on_data(
    function: Callable[..., Any], captured: bool, any_target: str, counts: Counter[str]
) -> None:
    settings = {"capture_dynamic_output_shape_ops": captured, "capture_scalar_outputs": captured}
    with torch._dynamo.config.patch(settings):
        compiled = torch.compile(
            function, backend="npu_iree", options={"target": any_target}, fullgraph=captured
        )
        graphs = set()
        for seed in range(4):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)) + seed - 1
            assert_same(compiled(x), function(x))
            graphs.add(counts["graphs"])
        nothing, everything = torch.full((5, 6), -1.0), torch.full((5, 6), 2.0)
        for x in (nothing, everything):
            assert_same(compiled(x), function(x))
    assert counts["regions"] >= 1
    assert not captured or graphs == {1}


def test_gradients_flow_through_a_mask(any_target: str) -> None:
    outcomes = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(
            lambda x: (x[x > 0] * 3).sum() + x.exp().sum(),
            backend="npu_iree", options={"target": any_target}, fullgraph=True,
        )  # fmt: skip
        for seed in range(3):
            pair = []
            for call in (compiled, lambda x: (x[x > 0] * 3).sum() + x.exp().sum()):
                x = torch.randn(7, generator=torch.Generator().manual_seed(seed)).requires_grad_()
                call(x).backward()
                pair.append(x.grad)
            outcomes.append(pair)
    for pair in outcomes:
        assert_same(*pair)


def test_square_matrices_are_packed_whole(any_target: str) -> None:
    functions: list[Callable[..., torch.Tensor]] = [torch.softmax, torch.mul]

    def program(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [
            function(x.unflatten(0, (-1, 4)), -1) @ y.unflatten(0, (-1, 4))
            for function, x, y in zip(functions, inputs[::2], inputs[1::2], strict=True)
        ]

    options = {"target": any_target, "fallback": "error"}
    compiled = torch.compile(program, backend="npu_iree", dynamic=True, options=options)
    for size in (136, 17, 200):
        inputs = [torch.randn(8, size, n) for n in (size, 16) * 2]
        torch.testing.assert_close(compiled(*inputs), program(*inputs), rtol=1e-4, atol=1e-4)

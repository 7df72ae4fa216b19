"""Graphs that come out of PyTorch's cache are those that AOTAutograd would trace."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

import npu_iree
import npu_iree.aot_graph
from tolerances import assert_same


@pytest.fixture(autouse=True)
def folder(shared_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of PyTorch's caches, empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path / "inductor"


@pytest.fixture(autouse=True)
def found() -> Iterator[Counter[str]]:
    """PyTorch's counters, from zero: `autograd_cache_hit`, `autograd_cache_saved`."""
    torch._dynamo.reset()
    counters["aot_autograd"].clear()
    yield counters["aot_autograd"]
    torch._dynamo.reset()


def anew(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function as a new process does: all that is left is in the caches."""
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(function, backend="npu_iree", options=options)
    return compiled


def tanh_of_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + y)


X, Y = torch.randn(4, 8), torch.randn(4, 8)


def test_a_graph_is_traced_once(
    found: Counter[str], cold_counts: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = cold_counts
    monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path))
    for hits in (0, 1, 2):
        assert_same(anew(tanh_of_sum)(X, Y), tanh_of_sum(X, Y))
        assert (found["autograd_cache_saved"], found["autograd_cache_hit"]) == (1, hits)
        assert (counts["graphs"], counts["regions"]) == (hits + 1, hits + 1)
        assert (counts["compiles"], counts["cache_hits"]) == (1, hits)


def test_weights_are_those_of_the_call(found: Counter[str]) -> None:
    for hits in (0, 1):
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)).eval()
        with torch.no_grad(), npu_iree.record_transfers() as ledger:
            assert_same(anew(model)(X), model(X))
        assert found["autograd_cache_hit"] == hits
        bound = [entry.value for entry in ledger.entries if entry.reason == "bound once"]
        assert len(set(bound)) == len(bound) == 8  # of three layers, with a mean and a variance


def test_constants_of_a_graph_are_kept_with_it(found: Counter[str]) -> None:
    values = [float(i) for i in range(40)]

    def times(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(values)

    x = torch.randn(3, 40)
    for hits in (0, 1):
        assert_same(anew(times)(x), times(x))
        assert found["autograd_cache_hit"] == hits
    values[7] = -1.0
    assert_same(anew(times)(x), times(x))
    assert found["autograd_cache_hit"] == 1


def test_what_is_decided_of_a_graph_is_decided_anew(found: Counter[str]) -> None:
    """Options that do not change what is traced find the same graph, and are heeded."""
    assert_same(anew(tanh_of_sum)(X, Y), tanh_of_sum(X, Y))
    with npu_iree.record_transfers() as ledger:
        assert_same(anew(tanh_of_sum, disabled_ops=["aten.tanh"])(X, Y), tanh_of_sum(X, Y))
    assert found["autograd_cache_hit"] == 1
    (gathered,) = [entry for entry in ledger.entries if entry.kind == "d2h"]
    line = tanh_of_sum.__code__.co_firstlineno + 1
    assert gathered.where == f"{__file__}:{line} in tanh_of_sum"


def test_an_op_on_the_host_is_told_of_each_time(
    found: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    def median(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).median() + 1

    for hits in (0, 1):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "npu_iree"):
            assert_same(anew(median)(X), median(X))
        assert found["autograd_cache_hit"] == hits
        (warning,) = [r.getMessage() for r in caplog.records if "run on the host" in r.getMessage()]
        assert f"{__file__}:{median.__code__.co_firstlineno + 1} in median" in warning
    with pytest.raises(BackendCompilerFailed, match=r"aten\.median.*cannot lower it"):
        anew(median, fallback="error")(X)
    assert (found["autograd_cache_hit"], found["autograd_cache_bypass"]) == (2, 0)


@pytest.mark.parametrize(
    "options",
    [{"keep_ops": ["aten.gelu"]}, {"rng": "host"}, {"keep_ops": ["aten.tanh"], "rng": "host"}],
    ids=str,
)
def test_what_changes_the_tracing_finds_another_graph(
    options: dict[str, Any], found: Counter[str]
) -> None:
    for given in ({}, options):
        assert_same(anew(tanh_of_sum, **given)(X, Y), tanh_of_sum(X, Y))
    assert (found["autograd_cache_saved"], found["autograd_cache_hit"]) == (2, 0)


def test_equal_code_on_another_line_is_another_graph(found: Counter[str]) -> None:
    """A report would name the line of the first one."""
    functions = [
        lambda x: torch.tanh(x) * 2,
        lambda x: torch.tanh(x) * 2,
    ]
    for function in (*functions, *functions):
        assert_same(anew(function)(X), function(X))
    assert (found["autograd_cache_saved"], found["autograd_cache_hit"]) == (2, 2)


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x.t()  # a library's, for Inductor, which is quicker than a compiler of C++


def test_inductor_has_graphs_of_its_own(
    found: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first, second in (("npu_iree", "inductor"), ("inductor", "npu_iree")):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / first))
        found.clear()
        for backend in (first, second):
            torch._dynamo.reset()
            assert_same(torch.compile(product, backend=backend)(X), product(X))
        assert (found["autograd_cache_saved"], found["autograd_cache_hit"]) == (2, 0)


def write_both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y.mul_(2)
    return x + y


def assert_writes_as_eager(compiled: Callable[..., Any], layout: tuple[slice, slice]) -> None:
    ours, eagers = torch.arange(12.0), torch.arange(12.0)
    assert_same(compiled(*(ours[s] for s in layout)), write_both(*(eagers[s] for s in layout)))
    assert_same(ours, eagers)


def test_what_a_graph_writes_to_its_inputs_is_written(found: Counter[str]) -> None:
    for hits in (0, 1):
        compiled = anew(write_both)
        ours, eagers = [X.clone(), Y.clone()], [X.clone(), Y.clone()]
        assert_same(compiled(*ours), write_both(*eagers))
        assert_same(ours, eagers)
        assert found["autograd_cache_hit"] == hits
    shared = (slice(0, 8), slice(4, 12))
    assert_writes_as_eager(torch.compile(write_both, backend="npu_iree"), shared)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 1)], ids=str)
def test_inputs_that_share_memory_are_traced_each_time(
    order: tuple[int, ...], found: Counter[str]
) -> None:
    """PyTorch's key does not tell how they share it."""
    layouts = [
        (slice(0, 8), slice(0, 8)),
        (slice(0, 8), slice(4, 12)),
        (slice(0, 8), slice(2, 10)),
    ]
    assert_same(anew(write_both)(torch.ones(8), torch.ones(8)), torch.full((8,), 4.0))
    for i in order:
        assert_writes_as_eager(anew(write_both), layouts[i])
    assert_same(anew(write_both)(torch.ones(8), torch.ones(8)), torch.full((8,), 4.0))
    assert (found["autograd_cache_saved"], found["autograd_cache_hit"]) == (1, 1)


def test_a_view_at_another_place_is_another_graph(found: Counter[str]) -> None:
    def second(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((4,), (1,), 2) + 1

    for start in (0, 4, 0):
        x = torch.arange(16.0)[start : start + 8]
        assert_same(anew(second)(x), second(x))  # the second element of `x`'s whole memory
    assert (found["autograd_cache_saved"], found["autograd_cache_hit"]) == (2, 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x.clamp(min=n),
        lambda x, n: nn.functional.threshold(x, n, n),
        lambda x, n: nn.functional.hardtanh(x, -n, n),
        lambda x, n: x * n,
    ],
    ids=["clamp", "threshold", "hardtanh", "mul"],
)
def test_a_number_that_changes_is_heeded(function: Callable[..., Any]) -> None:
    """AOTAutograd may take it for a constant, under a guard that PyTorch's cache does not keep."""
    x = torch.linspace(0.1, 2, 12)
    for _ in range(2):
        compiled = anew(function)
        for number in (0.5, 1.0, 1.5):
            assert_same(compiled(x, number), function(x, number))


def test_sizes_that_depend_on_data_keep_their_guards(found: Counter[str]) -> None:
    least = [3]

    def nonzero(x: torch.Tensor, n: int) -> torch.Tensor:
        return x.nonzero() * (2 if n > least[0] else 3)

    x = torch.tensor([0.0, 1.0, 2.0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for least[0] in (3, 7):
            torch._dynamo.reset()
            compiled = torch.compile(nonzero, backend="npu_iree", dynamic=True)
            for n in (9, 5, 2):
                assert_same(compiled(x, n), nonzero(x, n))
    assert not {"autograd_cache_saved", "autograd_cache_hit"} & found.keys()


def test_a_training_step_is_traced_once(
    found: Counter[str], cold_counts: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept once its backward pass is compiled; that is compiled when it is first run."""
    counts = cold_counts
    monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path))
    weight = torch.randn(8, 8, requires_grad=True)
    expected = torch.autograd.grad(torch.tanh(X @ weight).sum(), weight)
    for hits in (0, 1, 2):
        compiled = anew(lambda x: torch.tanh(x @ weight))
        y = compiled(X)
        assert (found["autograd_cache_saved"], found["autograd_cache_hit"]) == (hits > 0, hits)
        assert counts["regions"] == 2 * hits + 1
        for _ in range(2):
            assert_same(torch.autograd.grad(y.sum(), weight, retain_graph=True), expected)
        assert counts["regions"] == 2 * hits + 2
        assert_same(torch.autograd.grad(compiled(X).sum(), weight), expected)
        assert (counts["compiles"], counts["cache_hits"]) == (2, 2 * hits)
        assert not functorch_config.bundled_autograd_cache
    assert found["autograd_cache_saved"] == 1


@pytest.mark.timeout(120, method="thread")  # two compiles that wait for each other
@pytest.mark.parametrize("backend", ["npu_iree", "aot_eager"])
def test_a_backward_pass_within_what_is_compiled(backend: str, found: Counter[str]) -> None:
    """The function is cut there; the second graph is compiled while Dynamo looks at each call.

    By another backend, too, after a step of ours.
    """
    weight = torch.randn(8, 8, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight).sum()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss(x).backward()
        return x + 1

    (expected,) = torch.autograd.grad(loss(X), weight)
    for hits in (0, 1):
        anew(loss)(X).backward()
        assert found["autograd_cache_hit"] == hits
        weight.grad = None
        compiled: Any = torch.compile(step, backend=backend)
        assert_same(compiled(X), X + 1)
        assert_same(weight.grad, expected)
        weight.grad = None
        found.clear()


class Trained(nn.Module):
    """What writes to its buffers, and draws numbers, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.second.weight = nn.Parameter(self.first.weight.t().detach().clone())
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = nn.functional.dropout(self.norm(self.first(x)), 0.5, self.training)
        return self.second(y), y.detach() + 1


@pytest.mark.slow
def test_steps_from_the_cache_are_those_that_were_traced(found: Counter[str]) -> None:
    """Gradients, statistics, numbers drawn, and what is frozen."""
    torch.manual_seed(0)
    given = Trained().state_dict()
    steps = []
    for hits in (0, 1):
        model = Trained()
        model.load_state_dict(given)
        compiled, results = anew(model), list[Any]()
        torch.manual_seed(1)
        for x in (X, 2 * X):
            y, other = compiled(x)
            y.square().sum().backward()
            results += [y.detach(), other]
        assert found["autograd_cache_hit"] == hits
        steps.append([*results, *(p.grad for p in model.parameters()), *model.buffers()])
    assert_same(steps[1], steps[0])
    model.first.requires_grad_(False)
    model.zero_grad()
    anew(model)(X)[0].sum().backward()
    assert found["autograd_cache_hit"] == 1, "what has no gradient is another graph"
    assert [p.grad is None for p in model.parameters()] == [True, True] + [False] * 4


def test_a_step_of_images_is_kept_too(found: Counter[str]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 2, 1))
    x = torch.randn(2, 3, 6, 7)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for hits in (0, 1):
        y = anew(model)(x)
        gradients = torch.autograd.grad(y.square().sum(), list(model.parameters()))
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)
        assert (found["autograd_cache_saved"], found["autograd_cache_hit"]) == (1, hits)


def test_a_step_without_a_backward_pass_is_traced_each_time(found: Counter[str]) -> None:
    """Its backward graph is not compiled for nothing."""
    for _ in range(2):
        assert_same(anew(torch.tanh)(X.clone().requires_grad_()).detach(), torch.tanh(X))
    assert (found["autograd_cache_saved"], found["autograd_cache_hit"]) == (0, 0)


def test_a_backward_pass_that_fails_leaves_the_cache_as_it_was(
    found: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        raise RuntimeError("no backward pass")

    x = X.clone().requires_grad_()
    y = anew(lambda x: torch.tanh(x) * 3)(x)
    with monkeypatch.context() as patch:
        patch.setattr("npu_iree.aot_cache._pickled", refuse)
        with pytest.raises(RuntimeError, match="no backward pass"):
            y.sum().backward()
    assert not functorch_config.bundled_autograd_cache
    assert found["autograd_cache_saved"] == 0


def test_a_backward_pass_from_the_cache_is_compiled_once_and_again_if_that_failed(
    found: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, x = (lambda x: torch.tanh(x) * 3), X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(anew(function)(x).sum(), x)
    y, compiled = anew(function)(x).sum(), Counter[str]()
    compile_one = npu_iree.aot_graph.compile_graph

    def compile_graph(*args: Any) -> Any:
        compiled["times"] += 1
        if compiled["times"] == 1:
            raise KeyboardInterrupt
        barrier.wait(60)
        return compile_one(*args)

    def backward(*ahead: Callable[[int], object]) -> torch.Tensor:
        for wait in ahead:
            wait(60)
        return torch.autograd.grad(y, x, retain_graph=True)[0]

    barrier = threading.Barrier(2)  # the second begins while the first compiles
    monkeypatch.setattr("npu_iree.aot_graph.compile_graph", compile_graph)
    with pytest.raises(KeyboardInterrupt):
        backward()
    with ThreadPoolExecutor(2) as pool:
        for gradient in [pool.submit(backward), pool.submit(backward, barrier.wait)]:
            assert_same(gradient.result(60), expected)
    assert (compiled["times"], found["autograd_cache_hit"]) == (2, 1)


def test_effects_in_their_order_are_traced_each_time(found: Counter[str]) -> None:
    """The inverse looks for an error, which is an effect: its order is a token, an input more."""
    for _ in range(2):
        assert_same(anew(torch.linalg.inv)(torch.eye(4) * 2), torch.eye(4) / 2)
    assert (found["autograd_cache_saved"], found["autograd_cache_hit"]) == (0, 0)


@torch.library.custom_op("npu_iree_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def user_op(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = twice(x + 1)
    return result


def test_an_op_of_the_users_is_traced_each_time(found: Counter[str]) -> None:
    for _ in range(2):
        assert_same(anew(user_op)(X), user_op(X))
    assert not {"autograd_cache_saved", "autograd_cache_hit"} & found.keys()


def test_a_decomposition_of_the_users_is_traced_each_time(found: Counter[str]) -> None:
    """PyTorch's key does not see what it does."""
    for factor in (2, 3):

        def times(x: torch.Tensor, factor: int = factor) -> torch.Tensor:
            return x * factor

        compiled = anew(torch.tanh, decompositions={torch.ops.aten.tanh.default: times})
        assert_same(compiled(X), X * factor)
    assert not {"autograd_cache_saved", "autograd_cache_hit"} & found.keys()


def test_sizes_that_may_change_are_traced_each_time(found: Counter[str]) -> None:
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(tanh_of_sum, backend="npu_iree", dynamic=True)
        for size in (3, 5):
            assert_same(compiled(X[:, :size], Y[:, :size]), tanh_of_sum(X[:, :size], Y[:, :size]))
    assert not {"autograd_cache_saved", "autograd_cache_hit"} & found.keys()


def test_an_op_of_pytorchs_that_was_replaced_is_traced_each_time(found: Counter[str]) -> None:
    def traced_as_tanh(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    assert_same(anew(torch.sinc)(X), torch.sinc(X))
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("square", traced_as_tanh, "CompositeImplicitAutograd")
        for _ in range(2):
            assert_same(anew(torch.square)(X), torch.square(X))
            assert_same(anew(torch.sinc)(X), torch.sinc(X))
    assert (found["autograd_cache_saved"], found["autograd_cache_hit"]) == (1, 0)


def test_without_dynamo_nothing_is_looked_for(found: Counter[str]) -> None:
    graph = torch.fx.symbolic_trace(lambda x: (torch.tanh(x) * 2,))
    for _ in range(2):
        (result,) = npu_iree.backend.npu_iree(graph, [X])(X)
        assert_same(result, torch.tanh(X) * 2)
    assert not {"autograd_cache_saved", "autograd_cache_hit"} & found.keys()


@pytest.mark.parametrize("switch", ["npu_iree", "torch", "bundled"])
@pytest.mark.parametrize("is_training", [False, True])
def test_it_can_be_turned_off(
    switch: str, is_training: bool, found: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch bundles what backends compile in modes that are for Inductor."""
    if switch == "npu_iree":
        monkeypatch.setenv("NPU_IREE_CACHE", "off")
    is_bundled = switch == "bundled"
    x = X.clone().requires_grad_(is_training)
    with functorch_config.patch(
        enable_autograd_cache=switch != "torch", bundled_autograd_cache=is_bundled
    ):
        for _ in range(2):
            result = anew(tanh_of_sum)(x, Y)
            assert_same(result, tanh_of_sum(x, Y))
            if is_training:
                result.sum().backward()
    assert not {"autograd_cache_saved", "autograd_cache_hit"} & found.keys()


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_damaged_entry_is_traced_again(
    damage: bytes | None, folder: Path, found: Counter[str]
) -> None:
    assert_same(anew(tanh_of_sum)(X, Y), tanh_of_sum(X, Y))
    (entry,) = [path for path in (folder / "aotautograd").rglob("*") if path.is_file()]
    entry.write_bytes(entry.read_bytes()[:-100] if damage is None else damage)
    assert_same(anew(tanh_of_sum)(X, Y), tanh_of_sum(X, Y))
    assert found["autograd_cache_hit"] == 0


def test_a_bundle_of_such_a_graph_is_whole(tmp_path: Path, found: Counter[str]) -> None:
    anew(tanh_of_sum)(X, Y)
    compiled = anew(tanh_of_sum)
    compiled(X, Y)
    assert found["autograd_cache_hit"] == 1
    bundle = npu_iree.save_bundle(compiled, tmp_path / "model.npub")
    again = anew(tanh_of_sum, bundle=bundle, compile="never")
    assert_same(again(X, Y), tanh_of_sum(X, Y))

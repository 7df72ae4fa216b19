"""Calls that are like those before take a short way; what they give, and fail with, is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.forward_ad import make_dual
from torch.utils import _pytree as pytree

import npu_iree
from npu_iree import aot, backend
from npu_iree.errors import DeviceError
from npu_iree.round_trip import RoundTrip
from npu_iree.runner import Runner
from npu_iree.timeline import observed

pytestmark = pytest.mark.usefixtures("shared_cache")

Compile = Callable[..., Runner]
SMALL, LARGE = (4, 4), (256, 256)


def double_and_keep(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results; the compiler hands out the argument itself as the second."""
    return x.relu() * 2, x + 0


def trip_of(runner: Runner) -> RoundTrip:
    """Return the only step of a graph that is there and back."""
    (step,) = runner._steps
    trip = step.__self__  # type: ignore[attr-defined]
    assert isinstance(trip, RoundTrip)
    return trip


def called_before(compile_: Compile, function: Callable[..., Any], *args: Any) -> Runner:
    """Compile a function, and call it until it knows where its arguments are."""
    runner = compile_(function, *args)
    for _ in range(3):
        runner(*args)
    return runner


def forbid_single_steps(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*_: Any) -> None:
        raise AssertionError("a single step was run")

    monkeypatch.setattr(trip_of(runner), "_one_by_one", [step])


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_a_call_like_those_before_is_one_step(
    compile_function: Compile, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    """On the calling thread and through the queue; each result has memory of its own."""
    x = torch.randn(shape)
    runner = called_before(compile_function, double_and_keep, x)
    forbid_single_steps(runner, monkeypatch)
    first = runner(x)
    x.neg_()
    second = runner(x)
    for result, expected in zip(second, double_and_keep(x), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    for result, expected in zip(first, double_and_keep(-x), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert len({t.data_ptr() for t in (x, *first, *second)}) == 5


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t()


def _elsewhere(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def _lazy_copy(x: torch.Tensor) -> torch.Tensor:
    return torch._lazy_clone(x)


def _second_half(x: torch.Tensor) -> torch.Tensor:
    """The same storage and shape, from another address."""
    return torch.cat([x, x + 1]).as_strided((4, 4), (4, 1), 16)


def _imaginary(x: torch.Tensor) -> torch.Tensor:
    """The same address, but each number negative to whoever reads it."""
    return torch._neg_view(x)


@pytest.mark.parametrize(
    "change",
    [_transposed, _elsewhere, _lazy_copy, _second_half, _imaginary],
    ids=lambda f: f.__name__,
)
def test_an_input_that_is_not_as_before_is_looked_at_anew(
    compile_function: Compile, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x, y = torch.randn(SMALL), torch.randn(SMALL)
    runner = called_before(compile_function, torch.sub, x, y)
    changed = change(x)
    for args in [(changed, y), (x, y), (y, changed), (x, y), (x, x)]:
        (result,) = runner(*args)
        torch.testing.assert_close(result, torch.sub(*args), rtol=0, atol=0)


def test_who_watches_sees_the_same_entries(compile_function: Compile) -> None:
    x = torch.randn(SMALL)
    runner = compile_function(double_and_keep, x)
    ledgers = []
    for _ in range(4):
        with npu_iree.record_transfers() as ledger:
            runner(x)
        ledgers.append(str(ledger))
        runner(x)
    assert ledgers[0]
    assert ledgers == ledgers[:1] * 4
    with npu_iree.copy_budget(waits=0), pytest.raises(npu_iree.HostCopyError):
        runner(x)


def test_a_failure_names_the_region_and_its_ops(
    compile_function: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(LARGE)
    runner = called_before(compile_function, double_and_keep, x)
    forbid_single_steps(runner, monkeypatch)
    with (
        npu_iree.open_device("npu-local").hold() as gate,
        observed(lambda _: gate.fail("boom")),  # as soon as it is submitted
        pytest.raises(DeviceError, match="boom") as caught,
    ):
        runner(x)
    assert any("relu" in op for op in caught.value.ops)
    torch.testing.assert_close(runner(x)[0], double_and_keep(x)[0])


def test_numbers_go_in_and_sizes_of_zero_do_not() -> None:
    @torch.compile(backend="npu_iree", dynamic=True)
    def scaled(x: torch.Tensor, n: int) -> torch.Tensor:
        return x.repeat(n, 1) * n

    with torch.no_grad():
        x = torch.randn(SMALL)
        for n in (2, 3, 2, 2, 3, 0, 2):
            torch.testing.assert_close(scaled(x, n), x.repeat(n, 1) * n)


def test_a_handle_takes_the_single_steps(compile_function: Compile) -> None:
    x = torch.randn(SMALL)
    runner = called_before(compile_function, double_and_keep, x)
    for result, expected in zip(
        runner(npu_iree.open_device("npu-local").put(x)), double_and_keep(x), strict=True
    ):
        torch.testing.assert_close(result, expected)


def returns_a_view_of_it(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.view(-1), x + 1


def writes_to_it(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + 1


def returns_a_view(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x + 1
    return y, y[0]


def runs_on_the_host(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(x + 4 * torch.eye(4)) + 1


WRAPPED = [returns_a_view_of_it, writes_to_it, returns_a_view, runs_on_the_host]


def compiled_and_asked(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Callable[..., Any], list[bool]]:
    """Compile a function, and note whether AOTAutograd's wrapper is left out."""
    said: list[bool] = []

    def needs_no_wrapper(*args: Any) -> bool:
        said.append(aot.needs_no_wrapper(*args))
        return said[-1]

    monkeypatch.setattr(backend, "needs_no_wrapper", needs_no_wrapper)
    return torch.compile(function, backend="npu_iree"), said


@pytest.mark.parametrize("function", WRAPPED, ids=lambda f: f.__name__)
def test_aotautograd_does_what_it_has_to_do(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, said = compiled_and_asked(function, monkeypatch)
    for _ in range(3):
        x = torch.randn(SMALL)
        mine = x.clone()
        with torch.no_grad():
            expected, result = function(x), compiled(mine)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(mine, x)
        assert mine._version == x._version
    assert said == [False]


def test_aotautograd_is_left_out_where_it_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With gradients on and off, and in inference mode."""
    compiled, said = compiled_and_asked(double_and_keep, monkeypatch)
    x = torch.randn(SMALL)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(compiled(x), double_and_keep(x))
    with forward_ad.dual_level():
        pairs = (
            map(forward_ad.unpack_dual, f(make_dual(x, x))) for f in (compiled, double_and_keep)
        )
        torch.testing.assert_close(*map(list, pairs))
    assert said
    assert all(said)
    assert not compiled(x)[0].requires_grad


class Wrapped(torch.Tensor):
    """A tensor with one tensor inside."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    @torch._disable_dynamo
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made: Wrapped = make(cls, inner.shape, dtype=inner.dtype)
        return made

    @torch._disable_dynamo
    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __repr__(self, **_: Any) -> str:
        return "Wrapped"  # PyTorch's own runs ops

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Wrapped:
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = pytree.tree_map_only(Wrapped, lambda t: t.inner, (args, kwargs or {}))
        result = op(*plain[0], **plain[1])
        return pytree.tree_map_only(torch.Tensor, Wrapped, result)


def test_subclasses_of_tensors_keep_aotautograd(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, said = compiled_and_asked(lambda x: x * 2 + 1, monkeypatch)
    with torch.no_grad():
        for x in (torch.randn(SMALL), torch.randn(SMALL)):
            result = compiled(Wrapped(x))
            assert isinstance(result, Wrapped)
            torch.testing.assert_close(result.inner, x * 2 + 1)
    assert said == [False]


def test_a_graph_with_gradients_keeps_aotautograd(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, said = compiled_and_asked(double_and_keep, monkeypatch)
    x = torch.randn(SMALL, requires_grad=True)
    sum(compiled(x)).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (x > 0) * 2.0 + 1)
    assert not any(said)


def test_results_that_are_in_place_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written where it belongs is no tensor anew, until an argument lies elsewhere."""

    @torch.compile(backend="npu_iree", dynamic=False)
    def store(
        keys: torch.Tensor, values: torch.Tensor, where: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        keys.index_copy_(0, where, x)
        values.index_copy_(0, where, x * 2)
        return keys.sum(0) - values.sum(0)

    made: list[torch.dtype] = []
    device = npu_iree.open_device("npu-local")
    as_tensor = device.as_tensor
    monkeypatch.setattr(device, "as_tensor", lambda v, d: made.append(d) or as_tensor(v, d))
    caches = {name: (torch.zeros(64, 64), torch.ones(64, 64)) for name in ("one", "other")}
    expected = {name: (k.clone(), v.clone()) for name, (k, v) in caches.items()}
    where, x = torch.tensor([0]), torch.randn(1, 64)
    counts = []
    with torch.no_grad():
        for i, name in enumerate(["one"] * 6 + ["other"] * 2 + ["one"] * 3 + ["other", "one"]):
            keys, values = caches[name] if i != 10 else caches[name][::-1]
            their_keys, their_values = expected[name] if i != 10 else expected[name][::-1]
            where.fill_(i)
            x.copy_(torch.randn(1, 64))
            made.clear()
            result = store(keys, values, where, x)
            counts.append(made.count(torch.float32))  # and not what says that the index is right
            their_keys[i], their_values[i] = x[0], x[0] * 2
            torch.testing.assert_close((keys, values), (their_keys, their_values), rtol=0, atol=0)
            torch.testing.assert_close(result, their_keys.sum(0) - their_values.sum(0))
    assert counts[5] == 1, "only the result that is none of the arguments"
    assert counts[0] == counts[6] == 3

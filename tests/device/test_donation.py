"""Donated tensors: their memory comes back, whoever uses them is told, and nothing else changes."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import npu_iree
from npu_iree.device import Device
from programs import donated_cache
from tolerances import assert_same

NPU = "npu"
Use = Callable[[torch.Tensor], object]


@pytest.fixture(autouse=True)
def _goes_on() -> object:
    yield
    assert (torch.ones(3, device=NPU) + 1).tolist() == [2, 2, 2]


def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2 + y


def donating(function: Callable[..., Any], *names: str | int) -> Callable[..., Any]:
    return torch.compile(function, backend="npu_iree", options={"donate": list(names)})


def donated() -> torch.Tensor:
    """A tensor whose memory a call has taken over."""
    x = torch.randn(4, 8, device=NPU)
    donating(scaled, "x")(x, torch.ones(8, device=NPU))  # the line that is named
    return x


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: x.cpu(),
        lambda x: str(x),
        lambda x: x.tolist(),
        lambda x: x[0, 0].item(),
        lambda x: x.clone(),
        lambda x: copy.deepcopy(x),
        lambda x: x.zero_(),
        lambda x: x.copy_(torch.ones(4, 8)),
        lambda x: x.normal_(),
        lambda x: x.median(),
        lambda x: x.t() @ x,
        lambda x: torch.ones(4, 8, device=NPU).copy_(x),
        lambda x: torch.relu(x[1:3]),
        lambda x: x.resize_(100, 100),
        lambda x: x.untyped_storage().cpu(),
        lambda x: npu_iree.wait_any([x]),
        lambda x: donating(scaled, "x")(x, torch.ones(8, device=NPU)),
        lambda x: torch.compile(scaled, backend="npu_iree")(x, torch.ones(8, device=NPU)),
    ],
)
def test_any_use_after_is_told_where_the_tensor_went(use: Use) -> None:
    x = donated()
    with pytest.raises(RuntimeError, match="memory was donated to scaled, as 'x'") as caught:
        use(x)
    assert f"{__file__}:" in str(caught.value)
    assert "in donated: neither it nor its views" in str(caught.value)
    assert "donate a clone" in str(caught.value)
    assert isinstance(caught.value, npu_iree.DonatedTensorError)
    assert x.shape == (4, 8)


def test_views_go_with_it_and_clones_stay() -> None:
    x, y = torch.randn(4, 8), torch.ones(8)
    a = x.to(NPU)
    row, whole, clone = a[1], a.view(-1), a.clone()
    found = donating(scaled, "x")(a, y.to(NPU))
    for view in (row, whole, a.detach()):
        with pytest.raises(npu_iree.DonatedTensorError):
            view.cpu()
    assert_same(found.cpu(), scaled(x, y))
    assert_same(clone.cpu(), x)
    a.set_(clone)  # other memory
    assert_same(a.cpu(), x)


def test_a_backward_pass_of_before_is_told() -> None:
    w = torch.ones(8, device=NPU, requires_grad=True)
    x = torch.randn(4, 8, device=NPU)
    loss = (w * x).sum()
    donating(scaled, "x")(x, torch.ones(8, device=NPU))
    with pytest.raises(npu_iree.DonatedTensorError):
        loss.backward()


@pytest.mark.parametrize(("names", "more"), [((), 4 << 16), (("x",), 0)])
def test_its_memory_is_that_of_the_result(names: tuple[str, ...], more: int) -> None:
    compiled, y = donating(scaled, *names), torch.ones(1, device=NPU)
    compiled(torch.ones(1 << 16, device=NPU), y)
    x = torch.ones(1 << 16, device=NPU) * 3
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    z = compiled(x, y)
    assert torch.npu.memory_allocated() - before == more
    assert torch.npu.max_memory_allocated() - before == more
    assert z[0].item() == 7


def test_the_beginning_of_a_larger_tensor() -> None:
    large = torch.ones(8, 4, device=NPU) * 3
    x, row = large[:4].clone(), torch.zeros(1, 4, device=NPU)
    new, _ = donating(updated, "cache")(x, row)
    assert new.sum(1).tolist() == [12, 0, 12, 12]
    assert large.sum(1).tolist() == [12] * 8


@pytest.mark.parametrize("target", ["npu-local", "npu-virtual"])
def test_what_is_updated_is_updated_in_place_if_nobody_has_read_it(
    target: str, request: pytest.FixtureRequest
) -> None:
    if target == "npu-local":
        told = donated_cache.tell()
    else:
        told = request.getfixturevalue("told_of_npu_virtual")["donated cache"]
    assert told["kept"] == {"peaks": [1] * 5, "in place": [False] * 4, "right": True}
    assert told["donated"]["in place"] == [True] * 4
    assert told["donated"]["peaks"][1:] == [0] * 4  # the first is also that of a clone
    assert told["read"]["in place"] == [False] * 4
    assert told["donated"]["right"]
    assert told["read"]["right"]


def updated(cache: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    new = torch.slice_scatter(cache, row, 0, 1, 2)
    return new, new.sum(0)


@pytest.mark.parametrize(
    "piece",
    [
        lambda new: new.clone(),
        lambda new: new + 0,
        lambda new: new[1:3].clone(),
        lambda new: new[1] * 1,
        lambda new: new.reshape(2, -1).clone(),
        lambda new: new.t().contiguous(),
        lambda new: new.view(torch.int32).clone(),
    ],
)
def test_results_that_may_be_the_same_memory_keep_their_values(piece: Use) -> None:
    def step(cache: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, Any]:
        new = torch.slice_scatter(cache, row, 0, 1, 2)
        return new, piece(new)

    compiled, cache = donating(step, "cache"), torch.zeros(4, 4)
    held, expected, found = cache.to(NPU), [], []
    for i in range(4):
        row = torch.full((1, 4), float(i))
        cache, wanted = step(cache, row)
        held, result = compiled(held, row.to(NPU))
        expected.append(wanted)
        found.append(result)
    for wanted, result in zip(expected, found, strict=True):
        assert_same(result.cpu(), wanted)
    assert_same(held.cpu(), cache)


def test_what_was_submitted_before_reads_the_old_bytes(device: Device) -> None:
    compiled, row = donating(updated, "cache"), torch.full((1, 4), 5.0, device=NPU)
    cache = compiled(torch.zeros(3, 4, device=NPU), torch.ones(1, 4, device=NPU))[0]
    (cache * 2, cache.clone())
    cache = compiled(cache, torch.ones(1, 4, device=NPU))[0]
    with device.hold() as gate, npu_iree.copy_budget(d2h=0, waits=0):
        twice, clone = cache * 2, cache.clone()
        new = compiled(cache, row)[0]
        newest = compiled(new, row * 2)[0]
        assert not any(p.is_reached() for p in device.in_flight)
        gate.open()
    assert [t[1, 0].item() for t in (twice, clone, newest)] == [2, 1, 10]


def apart(x: list[torch.Tensor], *, y: dict[str, torch.Tensor]) -> torch.Tensor:
    return x[0] + x[1] * y["a"]


def everything(*args: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    return args[0] + args[1] * more["y"]


class Model(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return scaled(x, y)


@pytest.mark.parametrize(
    ("function", "wanted", "call", "gone"),
    [
        (apart, ["x"], lambda f, a, b, c: f([a, b], y={"a": c}), [True, True, False]),
        (apart, ["y"], lambda f, a, b, c: f([a, b], y={"a": c}), [False, False, True]),
        (apart, [0, "y"], lambda f, a, b, c: f([a, b], y={"a": c}), [True, True, True]),
        (everything, [1], lambda f, a, b, c: f(a, b, y=c), [False, True, False]),
        (everything, ["y"], lambda f, a, b, c: f(a, b, y=c), [False, False, True]),
        (Model(), [0], lambda f, a, b, c: f(a, y=b), [True, False, False]),
        (Model().forward, ["y"], lambda f, a, b, c: f(a, y=b), [False, True, False]),
        (nn.Sequential(nn.ReLU()), [0], lambda f, a, b, c: f(a), [True, False, False]),
        (nn.Sequential(nn.ReLU()), ["input"], lambda f, a, b, c: f(a), [True, False, False]),
    ],
)
def test_what_a_call_takes_is_named_as_its_parameters_are(
    function: Callable[..., Any], wanted: list[str | int], call: Any, gone: list[bool]
) -> None:
    tensors = [torch.ones(3, device=NPU) for _ in range(3)]
    call(donating(function, *wanted), *tensors)
    assert [is_gone(t) for t in tensors] == gone


def is_gone(tensor: torch.Tensor) -> bool:
    try:
        tensor.cpu()
    except npu_iree.DonatedTensorError:
        return True
    return False


def returns_a_view(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[1:], x + 1


def writes(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1) * 2


REFUSED: dict[str, tuple[Callable[..., Any], Callable[[torch.Tensor], Any]]] = {
    "'x': it is a parameter": (scaled, lambda a: (nn.Parameter(a), a * 2)),
    "'x': it requires grad": (scaled, lambda a: (a.requires_grad_(), a)),
    r"'x': it is on cpu, .* Move it": (scaled, lambda a: (torch.ones(4, 8), torch.ones(8))),
    "'x': it is also another argument": (scaled, lambda a: (a, a)),
    "'x': it shares its memory with another argument": (scaled, lambda a: (a, a[0])),
    "'x': a result of the function shares its memory": (returns_a_view, lambda a: (a,)),
    "'x': the function writes to it": (writes, lambda a: (a,)),
    "<lambda> has no parameter 'x'. There are: z": (lambda z: z + 1, lambda a: (a,)),
}


def test_what_cannot_be_donated_is_refused_and_stays() -> None:
    for reason, (function, arguments) in REFUSED.items():
        a, told = torch.ones(4, 8, device=NPU), ""
        try:
            donating(function, "x")(*arguments(a))
        except Exception as error:
            told = str(error)
        assert re.search(reason, told), f"{reason}: {told}"
        assert a.sum().item() == 32, reason


def test_what_the_backward_pass_reads_is_refused() -> None:
    model = nn.Linear(8, 8).to(NPU)
    x = torch.randn(4, 8, device=NPU)
    compiled = donating(lambda x: model(x), "x")
    with pytest.raises(Exception, match="cannot donate 'x': the backward pass reads it"):
        compiled(x)
    with torch.no_grad():
        compiled(x)
    with pytest.raises(npu_iree.DonatedTensorError):
        x.cpu()


def test_what_it_does_not_read_is_donated_in_training() -> None:
    w = torch.ones(8, device=NPU, requires_grad=True)
    x = torch.randn(4, 8, device=NPU)
    donating(lambda x: (w * 2 + x).sum(), "x")(x).backward()
    assert w.grad is not None
    assert_same(w.grad.cpu(), torch.full((8,), 8.0))
    with pytest.raises(npu_iree.DonatedTensorError):
        x.cpu()


def test_nothing_is_donated_where_the_function_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return y + x

    a = torch.ones(3, device=NPU)
    with caplog.at_level(logging.WARNING, "npu_iree"):
        assert donating(broken, "x")(a).tolist() == [2, 2, 2]
    assert a.tolist() == [1, 1, 1]
    assert "broken has a graph break" in caplog.text


def test_what_is_not_read_is_not_donated(caplog: pytest.LogCaptureFixture) -> None:
    def idle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y + 1

    a, b = torch.ones(3, device=NPU), torch.ones(3, device=NPU)
    with caplog.at_level(logging.WARNING, "npu_iree"):
        donating(idle, "x")(a, b)
    assert a.tolist() == b.tolist() == [1, 1, 1]
    assert "idle reads no tensor of 'x'" in caplog.text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x", "a list of names of parameters, not 'x'"),
        (["x", "x"], "names 'x' twice"),
        ([-1], "-1 is no name or position"),
        ([None], "None is no name or position"),
    ],
)
def test_the_option_is_checked(value: object, message: str) -> None:
    with pytest.raises(npu_iree.OptionError, match=message):
        npu_iree.Options.parse({"donate": value})


def layers(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(count) for layer in (nn.Linear(32, 32), nn.Tanh())])


def test_a_backward_pass_gives_back_what_was_saved_before_it_makes_gradients() -> None:
    model, x = layers(3).to(NPU), torch.randn(64, 32, device=NPU)
    compiled, grad = torch.compile(model, backend="npu_iree"), torch.ones(64, 32, device=NPU)
    for _ in range(2):
        model.zero_grad()
        y = compiled(x)
        before = torch.npu.memory_allocated()
        torch.npu.reset_peak_memory_stats()
        y.backward(grad)
        assert torch.npu.max_memory_allocated() == before
    assert torch.npu.memory_allocated() < before


def test_a_backward_pass_may_run_twice() -> None:
    model, twin = layers(2), layers(2).to(NPU)
    x, compiled = torch.randn(64, 32), torch.compile(twin, backend="npu_iree")
    grad = torch.ones(64, 32)
    compiled(x.to(NPU)).backward(grad.to(NPU))
    model(x).backward(grad)
    for again in (model(x), compiled(x.to(NPU))):
        again.backward(grad.to(again.device), retain_graph=True)
        again.backward(grad.to(again.device))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-4)  # type: ignore

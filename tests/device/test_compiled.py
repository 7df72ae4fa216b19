"""`torch.compile` on "npu" tensors: handles in, handles out, and nothing waits in between."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame

import npu_iree
from npu_iree.device import Device
from npu_iree.runner import Runner
from tolerances import assert_same

NPU = "npu"


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def test_chained_models_are_submitted_behind_a_shut_gate(device: Device) -> None:
    m1, m2, x = mlp(), mlp(), torch.randn(4, 8)
    expected = m2(m1(x)).detach()
    c1, c2 = (torch.compile(m.to(NPU), backend="npu_iree") for m in (m1, m2))
    a = x.to(NPU)
    with torch.no_grad():
        c2(c1(a))  # both are compiled
        with device.hold() as gate, npu_iree.copy_budget(h2d=0, d2h=0, waits=0):
            y = c2(c1(a))
            assert y.device.type == "npu"
            assert not any(p.is_reached() for p in device.in_flight)
            gate.open()
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_a_graph_break_keeps_handles(device: Device) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) * 2
        torch._dynamo.graph_break()
        return (y + x).sum(0)

    x = torch.randn(4, 8)
    a = x.to(NPU)
    compiled = torch.compile(broken, backend="npu_iree")
    compiled(a)
    with device.hold() as gate, npu_iree.copy_budget(d2h=0, waits=0):
        y = compiled(a)
        gate.open()
    torch.testing.assert_close(y.cpu(), broken(x), rtol=1e-4, atol=1e-5)


def test_mutated_inputs_swap_handles_and_their_views_see_it() -> None:
    def step(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.add_(x)
        return cache * 2

    cache, x = torch.zeros(3, 4), torch.randn(3, 4)
    a, b = cache.to(NPU), x.to(NPU)
    row, storage = a[1], a.untyped_storage()
    compiled = torch.compile(step, backend="npu_iree")
    compiled(a, b)
    with npu_iree.copy_budget(h2d=0, d2h=0, waits=0):
        y = compiled(a, b)
    assert a.untyped_storage() is storage
    for _ in range(2):
        z = step(cache, x)
    assert_same(a.cpu(), cache)
    assert_same(row.cpu(), cache[1])
    assert_same(y.cpu(), z)


def test_results_that_are_views_of_each_other_share_memory() -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(x) + 1
        return y, y.t()

    x = torch.randn(3, 4)
    y, t = torch.compile(two, backend="npu_iree")(x.to(NPU))
    y.zero_()
    assert t.shape == (4, 3)
    assert t.abs().sum().item() == 0
    largest, turned = torch.compile(lambda x: ((y := x.max(0)[0]), y[1:]), backend="npu_iree")(y)
    largest.fill_(2)
    assert turned.tolist() == [2, 2, 2]


@pytest.mark.parametrize("layout", ["slice", "transposed", "expanded", "channels_last"])
def test_inputs_of_any_layout(layout: str) -> None:
    x = {
        "slice": lambda: torch.randn(4, 6)[:, 1:5],
        "transposed": lambda: torch.randn(4, 6).t(),
        "expanded": lambda: torch.randn(4, 1).expand(4, 5),
        "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }[layout]()
    a = x.to(NPU)
    if layout == "slice":
        a = torch.cat([x[:, :1], x, x[:, :1]], 1).to(NPU)[:, 1:5]

    def scaled(t: torch.Tensor) -> torch.Tensor:
        return torch.tanh(t) * 2

    assert_same(torch.compile(scaled, backend="npu_iree")(a).cpu(), scaled(x))


def test_host_ops_in_a_graph_get_what_they_read_and_no_more() -> None:
    def centred(x: torch.Tensor, big: torch.Tensor) -> torch.Tensor:
        return torch.relu(x - x.median()) + big.sum()

    x, big = torch.randn(8), torch.randn(64, 64)
    a, b = x.to(NPU), big.to(NPU)
    compiled = torch.compile(centred, backend="npu_iree")
    compiled(a, b)
    with npu_iree.record_transfers() as ledger:
        y = compiled(a, b)
    torch.testing.assert_close(y.cpu(), centred(x, big), rtol=1e-4, atol=1e-4)
    assert [e.nbytes for e in ledger.transfers if e.kind == "d2h"] == [x.nbytes]
    assert len(ledger.waits) == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.complex32], ids=str)
def test_host_ops_in_a_graph_read_what_the_device_only_keeps(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 64.0]]).to(dtype)
    compiled = torch.compile(lambda x: x.long(), backend="npu_iree")
    for layout in (lambda x: x, lambda x: x.t(), lambda x: x[:, ::2]):
        assert_same(compiled(layout(x.to(NPU))).cpu(), layout(x).long())


def test_the_default_device_may_be_npu() -> None:
    """PyTorch's own functions then make what they make there, but for what we make on the host."""

    def function(x: torch.Tensor, host: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:, ::2] * 3, torch.linalg.inv(x), host.to(NPU) + 1

    x, host = 2 * torch.eye(4), torch.randn(4, 8)[:, ::2]
    expected = (x[:, ::2] * 3, torch.linalg.inv(x), host + 1)
    with torch.device(NPU):
        given = x.to(NPU)
        for call in (function, torch.compile(function, backend="npu_iree")):
            assert_same([r.cpu() for r in call(given, host)], list(expected))
        given.resize_(40)
        assert torch.arange(3).fill_(2).add(300).cpu().tolist() == [302] * 3


def test_random_numbers_need_no_bytes_of_the_device(device: Device) -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x * 2, 0.5) + torch.rand_like(x)

    x = torch.ones(50)
    a = x.to(NPU)
    compiled = torch.compile(noisy, backend="npu_iree")
    compiled(a)
    torch.manual_seed(3)
    with npu_iree.copy_budget(d2h=0, waits=0):
        y = compiled(a)
    torch.manual_seed(3)
    assert_same(y.cpu(), noisy(x))


def test_another_batch_size_is_one_more_compile_and_then_none(counts: Counter[str]) -> None:
    compiled = torch.compile(mlp().to(NPU), backend="npu_iree")
    model = mlp()
    seen = []
    with torch.no_grad():
        for batch in (4, 7, 9, 33):
            x = torch.randn(batch, 8)
            torch.testing.assert_close(compiled(x.to(NPU)).cpu(), model(x), rtol=1e-4, atol=1e-5)
            seen.append(counts["graphs"])
    assert seen == [1, 2, 2, 2]


def test_the_target_is_that_of_the_device() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="npu_iree", options={"target": "npu-virtual"})
    with pytest.raises(Exception, match="its tensors cannot go to 'npu-virtual'"):
        compiled(torch.ones(2, device=NPU))


@pytest.mark.parametrize("where", ["cpu", NPU])
def test_a_compiled_graph_is_freed_by_a_reset(where: str) -> None:
    def runners() -> set[int]:
        return {id(r) for r in gc.get_objects() if type(r) is Runner}

    gc.collect()
    before = runners()
    model, x = mlp().to(where), torch.randn(4, 8).to(where)
    torch.compile(model, backend="npu_iree")(x).sum().backward()
    assert len(runners() - before) == 2  # forward and backward
    torch._dynamo.reset()
    del model, x
    gc.collect()
    assert runners() <= before


def test_arguments_that_overlap_otherwise_than_at_the_first_call() -> None:
    def shifted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        b.mul_(2)
        return a + b

    compiled = torch.compile(shifted, backend="npu_iree", dynamic=False)
    for first, second in [(0, 4), (0, 2), (2, 0), (4, 0), (0, 0)]:
        base = torch.arange(8.0)
        twin = base.to(NPU)
        expected = shifted(base[first : first + 4], base[second : second + 4])
        found = compiled(twin[first : first + 4], twin[second : second + 4])
        assert_same(found.cpu(), expected)
        assert_same(twin.cpu(), base)


def test_ops_between_graphs_are_not_traced_into() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        return y * torch.nonzero(y).sum() + float(y.max())

    x = torch.randn(4, 8)
    before = convert_frame.FRAME_COUNTER
    found = torch.compile(broken, backend="npu_iree")(x.to(NPU))
    assert_same(found.cpu(), broken(x))
    assert convert_frame.FRAME_COUNTER - before <= 4, "this function, and what is left of it"


def test_what_makes_kernels_is_not_traced_into() -> None:
    """While a compiled function that is cut runs backward, PyTorch calls ops of its own."""
    weight = torch.randn(8, 8).to(NPU).requires_grad_()

    def step(x: torch.Tensor) -> torch.Tensor:
        torch.tanh(x @ weight).softmax(-1).square().mean().backward()
        return x + 1

    before = convert_frame.FRAME_COUNTER
    torch.compile(step, backend="npu_iree")(torch.randn(4, 8).to(NPU))
    assert weight.grad is not None
    assert convert_frame.FRAME_COUNTER - before <= 2, "this function, and what is left of it"


def test_host_memory_that_is_overwritten_after_the_call_has_been_read(device: Device) -> None:
    x, w = torch.full((64, 64), 2.0), torch.eye(64).to(NPU)
    array = x.numpy()  # PyTorch sees no write by it

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.to(NPU) @ w

    fast = torch.compile(product, backend="npu_iree")
    with torch.no_grad():
        fast(x, w)
        with device.hold() as gate:
            y = fast(x, w)
            array[:32] = -1
            x[32:].fill_(-1)
            gate.open()
        assert_same(y.cpu(), torch.full((64, 64), 2.0))
    assert (array == -1).all()


def test_a_view_of_an_argument_stays_on_the_device() -> None:
    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x[:, 3] * torch.median(y.relu())  # which only the host has

    x, y = torch.randn(4, 8), torch.randn(5)
    fast = torch.compile(scaled, backend="npu_iree")
    device_x, device_y = x.to(NPU), y.to(NPU)
    fast(device_x, device_y)
    with npu_iree.record_transfers() as transfers:
        result = fast(device_x, device_y)
    assert [t.nbytes for t in transfers.entries if t.kind == "d2h"] == [y.nbytes]
    torch.testing.assert_close(result.cpu(), scaled(x, y))


@pytest.mark.parametrize("writes", [False, True])
def test_a_view_of_an_argument_lies_in_it_wherever_sizes_put_it(writes: bool) -> None:
    def last(x: torch.Tensor) -> torch.Tensor:
        if writes:
            x.add_(1)
        return x[x.shape[0] // 2 :]

    npu_iree.register_device()
    compiled = torch.compile(last, backend="npu_iree", dynamic=True)
    for rows in (6, 9):
        x = torch.arange(rows * 8.0).reshape(rows, 8)
        base = x.to(NPU)
        result = compiled(base[1:, 2:6])
        expected = last(x[1:, 2:6])
        assert (result.stride(), result.storage_offset()) == (
            expected.stride(),
            expected.storage_offset(),
        )
        torch.testing.assert_close(result.cpu(), expected)
        result.zero_()
        expected.zero_()
        torch.testing.assert_close(base.cpu(), x)


def test_views_of_results_lie_in_them_wherever_sizes_put_them() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * w
        return y[x.shape[0] // 2 :], y.view(-1)[x.shape[0] :], y, y.t()[:, x.shape[0] - 2 :]

    npu_iree.register_device()
    compiled = torch.compile(function, backend="npu_iree", dynamic=True)
    for rows in (6, 9):
        x, found = torch.arange(rows * 2.0).reshape(rows, 2), []
        for run, device in ((function, "cpu"), (compiled, NPU)):
            w = torch.tensor(3.0, device=device, requires_grad=True)
            views = run(x.to(device), w)
            places = [(v.shape, v.stride(), v.storage_offset()) for v in views]
            sum((v * v).sum() for v in views).backward()
            assert w.grad is not None
            found.append(([v.detach().cpu() for v in views], w.grad.cpu(), places))
        assert_same(found[1][:2], found[0][:2])
        assert found[1][2] == found[0][2]
    with torch.no_grad():
        part, *_, whole, _ = compiled(x.to(NPU), torch.tensor(3.0, device=NPU))
        part.zero_()
        assert whole.cpu()[-1].tolist() == [0, 0]


def test_what_may_not_be_compiled_runs_on_the_cpu_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: Counter[str]
) -> None:
    def function(x: torch.Tensor, total: torch.Tensor, w: torch.Tensor) -> tuple[Any, ...]:
        total.add_(x.sum())
        y = x.t() @ w
        return y.square().sum(), y[1:], total * 2

    monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path))
    compiled = torch.compile(function, backend="npu_iree", options={"compile": "eager"})
    x, found = torch.randn(4, 3).t(), []
    for run, device in ((function, "cpu"), (compiled, NPU)):
        total = torch.zeros(2, device=device)
        w = torch.ones(3, 5, device=device, requires_grad=True)
        results = run(x.to(device), total, w)
        results[0].backward()
        assert w.grad is not None
        assert {r.device.type for r in results} == {device}
        found.append([*(r.detach().cpu() for r in (*results, total)), w.grad.cpu()])
    assert_same(found[1], found[0])
    assert counts["regions"] == 0


def test_explain_tells_what_crosses() -> None:
    told = npu_iree.explain(lambda x: torch.relu(x @ x) + 1, torch.randn(4, 4, device=NPU))
    assert (len(told.regions), told.graphs[0].transfers) == (1, [])
    told = npu_iree.explain(lambda x: torch.median(x) + x, torch.randn(4, 4, device=NPU))
    assert told.graphs[0].transfers == [("d2h", "x"), ("h2d", "median")]


def test_lazily_conjugated_arguments_are_read_so() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    compiled = torch.compile(lambda z: z * 2, backend="npu_iree")
    for view in (torch.conj, lambda z: z.conj().imag):
        assert_same(compiled(view(z.to(NPU))).cpu(), view(z) * 2)
    given = [z.clone().to(where).requires_grad_() for where in ("cpu", NPU)]
    for x, run in zip(given, (lambda z: z * 2, compiled), strict=True):
        (run(x).conj() * (1 + 2j)).real.sum().backward()  # the gradient is lazily conjugated
    assert_same(given[1].grad.cpu(), given[0].grad)


def test_an_argument_that_gets_other_memory_has_it_afterwards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.data = y * 2
        return x + 1

    x = torch.zeros(2, device=NPU)
    compiled = torch.compile(function, backend="npu_iree")
    assert compiled(x, torch.ones(2, device=NPU)).tolist() == [3, 3]
    assert x.tolist() == [2, 2]
    told = "a graph runs in eager: it gives an argument other memory"
    assert told in caplog.text
    explained = npu_iree.explain(function, x, torch.zeros(2, device=NPU))
    assert (len(explained.graphs), x.tolist()) == (0, [0, 0])
    assert told in str(explained)


def test_what_is_saved_of_an_argument_is_the_argument() -> None:
    """Autograd finds that somebody has written to it, and whose gradient a gradient depends on."""
    compiled = torch.compile(lambda x, w: (x * w * x).sum(), backend="npu_iree")
    x, w = torch.ones(2, device=NPU, requires_grad=True), torch.ones(2, device=NPU)
    result = compiled(x, w)
    w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
    result = compiled(x, w)
    (gradient,) = torch.autograd.grad(result, x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(gradient.square().sum() + compiled(x, w), x)


def test_the_bodies_of_a_condition_name_no_device() -> None:
    def function(which: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        places = torch.tensor([1, 0, 2], device=x.device)
        return torch.cond(
            which, lambda x: x[places] + torch.arange(3, device=x.device), torch.sin, (x,)
        )

    compiled, x = torch.compile(function, backend="npu_iree"), torch.rand(3)
    for value in (True, False):
        which = torch.tensor(value)
        assert_same(compiled(which.to(NPU), x.to(NPU)).cpu(), function(which, x))

"""Weights are bound once; whatever changes one shows in the next call, without a recompile."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import npu_iree
import npu_iree.runner as runner_module
from lowering.capture import capture_aot
from lowering.decompositions import decomposition_table
from npu_iree.aot_graph import compile_graph
from npu_iree.errors import ArgumentError, DeviceError
from npu_iree.executable import Executable
from npu_iree.options import Options
from npu_iree.timeline import Timepoint, Work
from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.table = torch.nn.Embedding(10, 16)
        self.last = torch.nn.Linear(16, 8)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)) * self.scale + self.table(i))


def double_data(model: TwoLayers) -> None:
    model.first.weight.data.mul_(2)


def write_in_place(model: TwoLayers) -> None:
    model.table.weight.add_(1)


def write_through_a_view(model: TwoLayers) -> None:
    model.last.weight.detach()[2:4].zero_()


def load_other_weights(model: TwoLayers) -> None:
    model.load_state_dict(TwoLayers().state_dict())


def replace_data(model: TwoLayers) -> None:
    model.last.bias.data = torch.randn(8)


def write_through_numpy(model: TwoLayers) -> None:
    model.first.bias.detach().numpy()[:] = 3.0


def change_a_buffer(model: TwoLayers) -> None:
    model.scale.fill_(5.0)


def step_an_optimizer(model: TwoLayers) -> None:
    with torch.enable_grad():
        model(torch.ones(1, 8), torch.ones(1, dtype=torch.long)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


CHANGES = [
    double_data,
    write_in_place,
    write_through_a_view,
    load_other_weights,
    replace_data,
    write_through_numpy,
    change_a_buffer,
    step_an_optimizer,
]


@pytest.fixture
def model() -> TwoLayers:
    return TwoLayers().eval()


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 8), torch.randint(0, 10, (4,))


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_change_shows_in_the_next_call_without_a_recompile(
    model: TwoLayers,
    inputs: tuple[torch.Tensor, torch.Tensor],
    change: Callable[[TwoLayers], None],
    target: str,
    counts: Counter[str],
) -> None:
    """After a first call, and after several, which look at the weights while the device works."""
    compiled = torch.compile(model, backend="npu_iree", options={"target": target})
    assert_same(compiled(*inputs), model(*inputs))
    names = ("graphs", "compiles", "cache_hits", "cache_misses")
    before = [counts[name] for name in names]
    for _ in range(2):
        change(model)
        for _ in range(3):
            assert_same(compiled(*inputs), model(*inputs))
    assert [counts[name] for name in names] == before


class Narrow(torch.nn.Module):
    """Has parameters with dimensions of size 1, which IREE folds away."""

    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Parameter(torch.randn(1, 1, 8))
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 4))
        self.conv = torch.nn.Conv2d(3, 8, 1)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x + self.token) * self.scale, self.conv(image)


@torch.no_grad()
def test_a_change_of_a_weight_with_dimensions_of_size_1_shows(any_target: str) -> None:
    model, inputs = Narrow().eval(), (torch.randn(2, 5, 8), torch.randn(1, 3, 4, 4))
    compiled = torch.compile(model, backend="npu_iree", options={"target": any_target})
    assert_same(compiled(*inputs), model(*inputs))
    for parameter in model.parameters():
        parameter.mul_(2)
        assert_same(compiled(*inputs), model(*inputs))


@torch.no_grad()
def test_after_a_change_that_could_not_be_bound_all_weights_are(
    model: TwoLayers, inputs: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.compile(model, backend="npu_iree")
    compiled(*inputs)
    model.last.bias.add_(1)
    with monkeypatch.context() as patch:
        patch.setattr(Executable, "rebind", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compiled(*inputs)
    assert_same(compiled(*inputs), model(*inputs))


class Summing(torch.nn.Module):
    """Writes to an argument in place: what has run in vain cannot be run again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, sums: torch.Tensor, i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        sums.index_put_((i,), self.layer(x), accumulate=True)
        return sums * 2


@torch.no_grad()
def test_a_change_shows_once_in_what_is_written_in_place(any_target: str) -> None:
    model, x, rows = Summing().eval(), torch.randn(100, 64), torch.randperm(512)[:100]
    sums, expected = torch.zeros(512, 64), torch.zeros(512, 64)
    compiled = torch.compile(model, backend="npu_iree", options={"target": any_target})
    for i in range(6):
        if i in (1, 4):
            model.layer.weight.mul_(2)
        assert_same(compiled(sums, rows, x), model(expected, rows, x))
        assert_same(sums, expected)


@torch.no_grad()
def test_no_other_weight_is_copied(
    model: TwoLayers, inputs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    compiled = torch.compile(model, backend="npu_iree", options={"target": "npu-virtual"})
    compiled(*inputs)
    model.first.weight.data.mul_(2)
    count = npu_iree.open_device("npu-virtual").memory.count
    before = count.h2d_bytes
    with npu_iree.record_transfers() as ledger:
        compiled(*inputs)
    expected = [model.first.weight.nbytes, *(t.nbytes for t in inputs)]
    assert sorted(e.nbytes for e in ledger.copies("h2d")) == sorted(expected)
    assert count.h2d_bytes - before == sum(expected)


class Alike(torch.nn.Module):
    """Weights that are packed in the same way, and such as are folded into one another."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = torch.nn.ModuleList(torch.nn.Conv2d(16, 16, 3) for _ in range(2))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(16) for _ in range(2))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.tanh(norm(convolution(x)))
        x = x.mean((2, 3))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.slow
def test_each_of_many_alike_is_bound_where_it_belongs(
    any_target: str, cold_counts: Counter[str]
) -> None:
    model, x = Alike().eval(), torch.randn(2, 16, 9, 9)
    compiled = torch.compile(model, backend="npu_iree", options={"target": any_target})
    with torch.no_grad():
        assert_same(compiled(x), model(x))
        names = [n for n, t in model.state_dict().items() if t.is_floating_point()]
        assert len(names) == 2 * (2 + 4 + 2)
        for is_first, name in itertools.product((True, False), names):
            model.state_dict()[name].mul_(0.5).add_(0.25)
            with npu_iree.record_transfers() as ledger:
                assert_same(compiled(x), model(x))
            moved = [t.value for t in ledger.transfers if t.kind == "h2d" and t.value != "x"]
            if is_first and name.startswith("norms"):  # what is used together is brought once
                norm = f"norms_modules_{name.split('.')[1]}_"
                assert all(norm in value for value in moved), (name, moved)
                assert any(value.endswith(name.split(".")[2]) for value in moved), (name, moved)
            else:
                assert len(moved) == 1, (name, moved)
        for name in names[::2]:
            model.state_dict()[name].mul_(0.5)
        assert_same(compiled(x), model(x))
    assert cold_counts["compiles"] == 1


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is small: what is submitted may wait."""
    monkeypatch.setattr(runner_module, "INLINE_EFFORT", 0)


@pytest.mark.usefixtures("queued")
def test_a_call_under_way_keeps_the_weights_that_it_began_with(target: str) -> None:
    """What is made of a weight is written where it lies, what is used as it is, swapped."""

    def scaled(x: torch.Tensor, w: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return (x @ w) * table[:4]

    x, old = torch.randn(4, 64), (torch.randn(64, 64), torch.randn(9, 64))
    graph = make_fx(scaled, decomposition_table=decomposition_table())(x, *old)
    runner = compile_graph(capture_aot(graph, [1, 2]), Options.parse({"target": target}))
    torch.testing.assert_close(runner(x, *old)[0], scaled(x, *old))
    device, executable = npu_iree.open_device(target), runner.executables["region0"]
    assert executable.can_rebind({"p0", "p1"})
    new = tuple(torch.randn_like(w) for w in old)
    weights = {f"p{i}": device.put(w) for i, w in enumerate(new)}
    device.synchronize()
    with device.hold() as gate:
        (first,) = executable.functions["main"](device.put(x))
        executable.rebind(weights, weights.keys())
        (second,) = executable.functions["main"](device.put(x))
        gate.open()
    torch.testing.assert_close(first.to_host(), scaled(x, *old))
    torch.testing.assert_close(second.to_host(), scaled(x, *new))


@torch.no_grad()
@pytest.mark.usefixtures("queued")
def test_after_work_that_failed_all_weights_are_bound_again(
    model: TwoLayers, inputs: tuple[torch.Tensor, torch.Tensor], target: str
) -> None:
    """What is made of a weight is written behind the calls under way, which may fail."""
    compiled = torch.compile(model, backend="npu_iree", options={"target": target})
    compiled(*inputs)
    device = npu_iree.open_device(target)
    gate = device.gate()
    under_way = Timepoint(gate.point.fence, Work("a call"))
    model.first.weight.mul_(2)
    rebind = Executable.rebind

    def rebind_and_fail(*args: Any) -> None:
        rebind(*args)
        gate.fail("the device was lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executable, "_under_way", lambda _: [under_way])
        patch.setattr(Executable, "rebind", rebind_and_fail)
        with pytest.raises(DeviceError, match="the device was lost"):
            compiled(*inputs)
    with contextlib.suppress(DeviceError):  # the next call may be told of it, too
        compiled(*inputs)
    assert_same(compiled(*inputs), model(*inputs))


@torch.no_grad()
def test_bound_weights_do_not_cross_at_later_calls(
    model: TwoLayers, inputs: tuple[torch.Tensor, torch.Tensor], target: str
) -> None:
    compiled = torch.compile(model, backend="npu_iree", options={"target": target})
    compiled(*inputs)
    with npu_iree.record_transfers() as ledger:
        compiled(*inputs)
    values = [entry.value for entry in ledger.transfers if entry.value != "checks"]
    assert len(values) == 3  # two inputs and the result


@torch.no_grad()
def test_reading_a_weight_binds_nothing_again(
    model: TwoLayers, inputs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    compiled = torch.compile(model, backend="npu_iree")
    compiled(*inputs)
    model(*inputs)
    str(model.first.weight)
    sum(p.abs().sum() for p in model.parameters())
    with npu_iree.record_transfers() as ledger:
        compiled(*inputs)
    assert not [e for e in ledger.transfers if e.reason == "it has changed"]


@torch.no_grad()
@pytest.mark.parametrize("source", ["numpy", "mapped file", "shared memory"])
def test_memory_that_cannot_be_watched_is_passed_at_each_call(source: str, tmp_path: Path) -> None:
    values = torch.randn(8, 8)
    if source == "numpy":
        array = values.numpy().copy()
        weight = torch.from_numpy(array)
    elif source == "mapped file":
        values.numpy().tofile(tmp_path / "w.bin")
        weight = torch.from_file(str(tmp_path / "w.bin"), shared=False, size=64).reshape(8, 8)
        array = weight.numpy()
    else:
        weight = values.share_memory_()
        array = weight.numpy()
    model = torch.nn.Linear(8, 8, bias=False)
    model.weight = torch.nn.Parameter(weight)
    compiled = torch.compile(model, backend="npu_iree")
    x = torch.randn(4, 8)
    assert_same(compiled(x), model(x))
    array[:] = np.float32(0.5)
    assert_same(compiled(x), model(x))


@torch.no_grad()
def test_bind_weights_off_honours_views_taken_before_the_first_call() -> None:
    model = torch.nn.Linear(8, 8)
    array = model.weight.detach().numpy()
    compiled = torch.compile(model, backend="npu_iree", options={"bind_weights": False})
    x = torch.randn(4, 8)
    assert_same(compiled(x), model(x))
    array[:] = 2.0
    assert_same(compiled(x), model(x))
    assert (model.weight == 2.0).all()


@torch.no_grad()
def test_the_users_aliases_of_a_weight_stay_aliases(
    model: TwoLayers, inputs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    row = model.first.weight.detach()[0]
    compiled = torch.compile(model, backend="npu_iree")
    compiled(*inputs)
    row.fill_(7.0)
    assert (model.first.weight[0] == 7.0).all()
    assert_same(compiled(*inputs), model(*inputs))


@torch.no_grad()
def test_tied_weights_stay_tied(any_target: str) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(10, 8)
            self.head = torch.nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.embed(i)))

    model, i = Tied(), torch.randint(0, 10, (5,))
    compiled = torch.compile(model, backend="npu_iree", options={"target": any_target})
    assert_same(compiled(i), model(i))
    model.head.weight.mul_(3)
    assert_same(compiled(i), model(i))


@torch.no_grad()
def test_two_graphs_share_a_weight_and_both_see_its_change(cold_counts: Counter[str]) -> None:
    layer = torch.nn.Linear(8, 8)
    one = torch.compile(lambda x: layer(x).relu(), backend="npu_iree")
    two = torch.compile(lambda x: layer(x).tanh(), backend="npu_iree")
    x = torch.randn(4, 8)
    one(x), two(x)
    layer.weight.mul_(2)
    assert_same(one(x), layer(x).relu())
    assert_same(two(x), layer(x).tanh())
    assert cold_counts["compiles"] == 2


@torch.no_grad()
def test_a_weight_in_memory_of_any_length_is_bound_once() -> None:
    """As in a file of weights that was read as a whole."""
    model, x = torch.nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    blob = torch.empty(8 * 8 * 4 + 1, dtype=torch.uint8)
    model.weight.data = blob[:-1].view(torch.float32).view(8, 8).copy_(model.weight)
    compiled = torch.compile(model, backend="npu_iree")
    assert_same(compiled(x), model(x))
    with npu_iree.record_transfers() as transfers:
        assert_same(compiled(x), model(x))
    assert not [t for t in transfers.entries if "weight" in t.value]


def test_weights_may_move_into_memory_of_others(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(4, 4)
    compiled, x = torch.compile(model, backend="npu_iree"), torch.randn(2, 4)
    numbers = np.ones((4, 4), dtype=np.float32)
    with torch.no_grad():
        assert_same(compiled(x), model(x))
        model.share_memory()
        assert_same(compiled(x), model(x))
        model.weight.data = torch.from_numpy(numbers)
        for _ in range(2):
            assert_same(compiled(x), model(x))
            numbers += 1  # which PyTorch does not see
        assert "is copied in each call" in caplog.text
        model.weight.data = torch.randn(4, 4)
        assert_same(compiled(x), model(x))


def test_a_write_that_was_going_on_is_seen_when_it_ends() -> None:
    """As if another thread's kernel had taken the address before the weight was bound."""
    model = torch.nn.Linear(4, 4)
    compiled, x = torch.compile(model, backend="npu_iree"), torch.ones(2, 4)
    with torch.no_grad():
        memory = torch.from_numpy(model.weight.detach().numpy())
        compiled(x)
        memory.mul_(3)
        torch.autograd.graph.increment_version(model.weight)
        assert_same(compiled(x), model(x))


class ResizedPositions(torch.nn.Module):
    """Those of a vision transformer: the class's are as they are, the others fit the image."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.nn.Parameter(torch.randn(1, 17, 32))
        self.last = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = self.positions[:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
        grid = torch.nn.functional.interpolate(grid, size=(6, 6), mode="bilinear")
        return self.last(x + torch.cat((self.positions[:, :1], grid.flatten(2).mT), 1))


def test_a_slice_of_a_weight_is_read_where_the_weight_is(cold_counts: Counter[str]) -> None:
    model, x = ResizedPositions().eval(), torch.randn(1, 37, 32)
    with torch.no_grad():
        compiled = torch.compile(model, backend="npu_iree")
        assert_same(compiled(x), model(x))
        model.positions.mul_(2)
        assert_same(compiled(x), model(x))
    found = [cold_counts[name] for name in ("compiles", "refused_flags", "host_ops")]
    assert found == [1, 0, 0]


class Stacked(torch.nn.Module):
    """Multiplies by parts of weights: whole matrices, or numbers from all over a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = torch.nn.Parameter(torch.randn(2, 256, 256))
        self.windows = torch.nn.Parameter(torch.randn(256, 256, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrices[1] @ self.windows[:, :, 1, 1]


@torch.no_grad()
def test_parts_of_weights_are_packed_once(dump: Path, counts: Counter[str]) -> None:
    model, x = Stacked(), torch.randn(64, 256)
    found = torch.compile(model, backend="npu_iree")(x)
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-2)
    (file,) = dump.rglob("03-*.mlir")
    main = file.read_text().partition("util.func public @main")[2]
    assert "@main_dispatch" in main
    assert "pack" not in main
    assert (counts["host_ops"], counts["refused_flags"]) == (0, 0)


def test_two_models_of_one_graph_in_two_threads_keep_their_weights() -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(2)]
    compiled = [torch.compile(model, backend="npu_iree") for model in models]
    x = torch.randn(2, 64)
    with torch.no_grad():
        wanted = [model(x) for model in models]
        for call in compiled:
            call(x)

    def wrong(call: Callable[..., torch.Tensor], expected: torch.Tensor) -> int:
        with torch.no_grad():
            return sum(not torch.allclose(call(x), expected, atol=1e-4) for _ in range(200))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wrong, compiled, wanted)) == [0, 0]


def test_a_weight_that_was_refused_and_is_corrected_is_bound() -> None:
    class Picks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("index", torch.tensor([0, 1, 2]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[self.index] * 2

    model, x = Picks(), torch.randn(8)
    fast = torch.compile(model, backend="npu_iree")
    for _ in range(4):
        fast(x)
    model.index[1] = 100
    with pytest.raises(IndexError):
        fast(x)
    model.index[1] = 3
    assert_same(fast(x), model(x))


def test_explain_knows_what_is_bound() -> None:
    with torch.no_grad():
        explained = npu_iree.explain(torch.nn.Linear(8, 8), torch.randn(4, 8))
        assert explained.graphs[0].transfers == [("h2d", "args_0"), ("d2h", "add")]
        with pytest.raises(npu_iree.OptionError, match="explain takes the model itself"):
            npu_iree.explain(torch.compile(torch.relu, backend="npu_iree"), torch.ones(2))
        npu_iree.explain(torch.compiler.disable(torch.relu), torch.ones(2))  # which is not it


def test_what_has_no_memory_is_an_error_and_no_crash() -> None:
    x = torch.randn(4, 6)
    fast = torch.compile(lambda x: torch.relu(x) * 2, backend="npu_iree")
    for _ in range(3):
        fast(x)
    with pytest.raises(ArgumentError, match="fake tensor"):
        fast(FakeTensorMode().from_tensor(torch.randn(4, 6)))
    x.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="more elements than its storage holds"):
        fast(x)


def test_a_weight_without_memory_is_an_error_and_no_crash() -> None:
    model = torch.nn.Linear(4, 4)
    fast = torch.compile(model, backend="npu_iree")
    with torch.no_grad():
        fast(torch.ones(2, 4))
        model.weight.untyped_storage().resize_(0)
        with pytest.raises(ArgumentError, match="weight has more elements than its storage holds"):
            fast(torch.ones(2, 4))

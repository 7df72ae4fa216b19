"""What eager refuses for its values is an error here, too, raised where somebody waits.

No memory but the tensor's is read or written meanwhile. What cannot be wrong is not checked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import npu_iree
from either import LOCAL_FIRST
from lowering.capture import capture_aot
from lowering.decompositions import decomposition_table
from lowering.region import Region
from npu_iree.device import open_device
from npu_iree.errors import IndexOutOfRangeError
from npu_iree.offline.build import BuildOptions, write_artifact
from npu_iree.options import Options
from npu_iree.toolchain import compiler_for
from tolerances import assert_same

Tensor = torch.Tensor
TABLE = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
FAR = 1 << 40

# What reads or writes by indices; the indices that it takes; those that it does not.
OPS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[int], list[int]]] = {
    "embedding": (lambda w, i: F.embedding(i, w), [0, 5], [-1, 6, FAR, -FAR]),
    "gather": (lambda w, i: w.gather(0, i.view(1, 1).expand(1, 4)), [0, 5], [-1, 6, FAR, -FAR]),
    "index": (lambda w, i: w[i], [0, 5, -1, -6], [6, -7, FAR, -FAR]),
    "index, second": (lambda w, i: w[:, i], [3, -4], [4, -5, FAR, -FAR]),
    "index, both": (lambda w, i: w[i, i], [3, -4], [4, 5, -5, FAR]),
    "index_select": (lambda w, i: w.index_select(1, i), [0, 3], [-1, 4, FAR, -FAR]),
    "index_put": (lambda w, i: w.index_put((i,), -w[:1]), [0, 5, -1, -6], [6, -7, FAR, -FAR]),
    "index_put, summed": (lambda w, i: w.index_put((i,), w[:1], True), [5, -6], [6, -7, FAR]),
    "index_put, second": (
        lambda w, i: torch.ops.aten.index_put(w, [None, i], -w[:, :1]), [3, -4], [4, -5, FAR]
    ),
    "index_add": (lambda w, i: w.index_add(1, i, w[:, :1], alpha=2), [0, 3], [-1, 4, FAR]),
    "index_copy": (lambda w, i: w.index_copy(0, i, -w[:1]), [0, 5], [-1, 6, FAR]),
    "index_fill": (lambda w, i: w.index_fill(1, i, 9.0), [0, 3, -1, -4], [4, -5, FAR, -FAR]),
    "scatter": (lambda w, i: w.scatter(1, i.view(1, 1), 9.0), [0, 3], [-1, 4, FAR, -FAR]),
    "scatter, into one": (lambda w, i: w[0, :1].scatter(0, i, 9.0), [0], [-1, 1, FAR]),
    "scatter of one, into one": (
        lambda w, i: w[0, :1].scatter(0, i, w[1, :1]), [0], [-1, 1, FAR, -FAR]
    ),
    "scatter_add": (lambda w, i: w.scatter_add(0, i.view(1, 1), w), [0, 5], [-1, 6, FAR, -FAR]),
    "scatter_reduce": (
        lambda w, i: w.scatter_reduce(0, i.view(1, 1), w, "amax"), [0, 5], [-1, 6, FAR, -FAR]
    ),
    "nll_loss": (lambda w, i: F.cross_entropy(w[:1], i), [0, 3], [4, FAR]),
}  # fmt: skip


FEW = ["embedding", "index, both", "index_put", "scatter_add"]  # sizes that are symbols take long


@pytest.mark.parametrize(
    ("names", "dynamic", "target"),
    [
        ([*OPS], False, "npu-local"),
        (FEW, True, "npu-virtual"),
        pytest.param([*OPS], False, "npu-virtual", marks=pytest.mark.sweep),
        pytest.param([*OPS], True, "npu-local", marks=pytest.mark.sweep),
        pytest.param([*OPS], True, "npu-virtual", marks=pytest.mark.sweep),
    ],
)
def test_out_of_range_is_eagers_error(names: list[str], dynamic: bool, target: str) -> None:
    """In one graph, where each op has an index of its own, and with it a check."""

    def every(w: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: of(w, given[name]) for name, (of, _, _) in functions.items()}

    ops = {name: OPS[name] for name in names}
    # sizes other than 0 and 1
    functions = {n: (_twice(of) if dynamic else of, *rest) for n, (of, *rest) in ops.items()}
    compiled = torch.compile(every, backend="npu_iree", dynamic=dynamic, options={"target": target})
    right = {name: torch.tensor(indices[:1]) for name, (_, indices, _) in ops.items()}
    for i in range(max(len(indices) for _, indices, _ in ops.values())):
        given = {
            name: torch.tensor(indices[i : i + 1] or indices[:1])
            for name, (_, indices, _) in ops.items()
        }
        assert_same(compiled(TABLE, given), every(TABLE, given))
    for name, (_, _, wrong) in ops.items():
        for index in wrong:
            given = {**right, name: torch.tensor([index])}
            assert error_of(every, TABLE, given), f"{name} takes {index}"
            op = name.replace(",", " ").split()[0]
            assert f"aten.{op}" in error_of(compiled, TABLE, given), f"{name} takes {index}"
    assert_same(compiled(TABLE, right), every(TABLE, right))


def error_of(call: Callable[..., Any], *args: Any) -> str:
    """Say what a call fails with; nothing, where it does not."""
    try:
        call(*args)
    except (IndexError, RuntimeError) as error:
        return str(error)
    return ""


def _twice(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda w, i: function(torch.cat([w, w])[: w.shape[0]], i)


DIVISIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "floor": lambda x, y: x // y,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "remainder": lambda x, y: x % y,
    "fmod": torch.fmod,
}


INTEGERS = (torch.int64, torch.int32)


@pytest.mark.parametrize("target", LOCAL_FIRST)
def test_integers_are_not_divided_by_zero(target: str) -> None:
    def every(x: Tensor, given: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        return {
            name: [divide(x.to(y.dtype), y) + 1 for y in given[name]]
            for name, divide in DIVISIONS.items()
        }

    compiled = torch.compile(every, backend="npu_iree", options={"target": target})
    x, y, zeros = torch.tensor([7, -7, 3]), torch.tensor([3, 2, -2]), torch.tensor([0, 2, 0])
    right = {name: [y.to(dtype, copy=True) for dtype in INTEGERS] for name in DIVISIONS}
    assert_same(compiled(x, right), every(x, right))
    for name in DIVISIONS:
        for i, dtype in enumerate(INTEGERS):
            given = {**right, name: [*right[name]]}
            given[name][i] = zeros.to(dtype)
            assert "ZeroDivisionError" in error_of(every, x, given), name
            assert "integer division by zero" in error_of(compiled, x, given), f"{name}, {dtype}"
    floats = {name: [zeros.double()] for name in DIVISIONS}
    assert_same(compiled(x, floats), every(x, floats))


@pytest.mark.parametrize("name", DIVISIONS)
def test_integers_are_not_divided_by_a_zero_that_is_written_down(name: str) -> None:
    function = DIVISIONS[name]
    compiled = torch.compile(lambda x: function(x, 0) + 1, backend="npu_iree")
    with pytest.raises(RuntimeError, match=r"integer division by zero|ZeroDivisionError"):
        compiled(torch.tensor([7, -7]))


def test_the_least_integer_divided_by_minus_one() -> None:
    names = ["floor", "remainder", "fmod"]  # eager's "trunc" is a SIGFPE

    def every(*given: tuple[Tensor, Tensor]) -> dict[str, list[Tensor]]:
        return {
            name: [DIVISIONS[name](x, by) ^ 1 for x, y in given for by in (y, y[0])]
            for name in names
        }

    least = [torch.iinfo(dtype).min for dtype in INTEGERS]
    given = [
        (torch.tensor([n, n + 1, 5, n], dtype=dtype), torch.tensor([-1, -1, -1, 1], dtype=dtype))
        for n, dtype in zip(least, INTEGERS, strict=True)
    ]
    assert_same(torch.compile(every, backend="npu_iree")(*given), every(*given))


def asserted(x: Tensor) -> Tensor:
    torch._assert_async((x > 0).all(), "x is positive")
    return x.sqrt() * 2


def asserted_of_a_view(x: Tensor) -> Tensor:
    """Nothing that is computed on the device is waited for."""
    torch._assert_async((x > 0).all(), "x is positive")
    return x.view(-1)


@pytest.mark.parametrize("call", [asserted, asserted_of_a_view])
def test_what_is_asserted_is_eagers_error(
    call: Callable[[Tensor], Tensor], target: str, counts: Counter[str]
) -> None:
    compiled = torch.compile(call, backend="npu_iree", options={"target": target})
    x = torch.tensor([[1.0, 2.0], [3.0, 0.5]])
    assert_same(compiled(x), call(x))
    for function in (call, compiled):
        with pytest.raises(RuntimeError, match="x is positive"):
            function(-x)
    assert counts["unsupported_ops"] == 0


@pytest.mark.parametrize("target", LOCAL_FIRST)
def test_classes_are_checked_on_the_device(target: str) -> None:
    options = {"target": target, "fallback": "error"}
    compiled = torch.compile(
        lambda i: F.one_hot(i, 4) @ torch.arange(4), backend="npu_iree", options=options
    )
    assert_same(compiled(torch.tensor([3, 0, 2])), torch.tensor([3, 0, 2]))
    with pytest.raises(RuntimeError, match=r"smaller than num_classes.*test_checks.py"):
        compiled(torch.tensor([3, 4, 2]))


def test_probabilities_are_checked_on_the_device() -> None:
    options = {"fallback": "error"}
    compiled = torch.compile(F.binary_cross_entropy, backend="npu_iree", options=options)
    good, bad = torch.tensor([0.0, 0.25, 1.0]), torch.tensor([0.5, float("nan"), 0.5])
    assert_same(compiled(good, good), F.binary_cross_entropy(good, good))
    for name, x, target in (
        ("input", bad, good), ("target", good, bad), ("input", good + 1, good),
        ("target", good, good - 1),
    ):  # fmt: skip
        for call in (F.binary_cross_entropy, compiled):
            with pytest.raises(RuntimeError, match=f"elements of {name} should be between 0 and 1"):
                call(x, target)
    compiled = torch.compile(F.binary_cross_entropy, backend="npu_iree")
    with pytest.raises(RuntimeError, match="Found dtype BFloat16 but expected Float"):
        compiled(good, good.bfloat16())
    drawn = torch.compile(torch.bernoulli, backend="npu_iree")
    assert_same(drawn(good.round()), good.round())
    for call in (torch.bernoulli, drawn):
        with pytest.raises(RuntimeError, match=r"Expected p_in >= 0 && p_in <= 1 to be true"):
            call(bad)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(5),
        lambda x: x.sort(-3)[0],
        lambda x: F.smooth_l1_loss(x, x + 1, beta=-1.0),
        lambda x: F.silu(x.long()),
        lambda x: F.layer_norm(x, (3,), x[0].double()),
        lambda x: torch.linalg.cross(x, x.double()),
    ],
    ids=["softmax", "sort", "smooth_l1_loss", "silu", "layer_norm", "cross"],
)
def test_what_only_eagers_kernels_refuse_is_refused(
    function: Callable[[Tensor], Tensor], counts: Counter[str]
) -> None:
    x = torch.ones(2, 3)
    errors = []
    for call in (function, torch.compile(function, backend="npu_iree")):
        with pytest.raises((IndexError, RuntimeError)) as caught:
            call(x)
        errors.append(str(caught.value))
    assert errors[1] == errors[0]
    assert not counts["healed_ops"]


def test_the_error_says_where() -> None:
    def look_up(table: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        known = F.embedding(tokens, table) * 2
        return known + table.index_select(0, places)

    compiled = torch.compile(look_up, backend="npu_iree")
    good, bad = torch.tensor([1, 2]), torch.tensor([0, 6])
    for args, op in (
        ((good, bad), "index_select"),
        ((bad, good), "embedding"),
        ((bad, bad), "emb"),
    ):
        with pytest.raises(IndexOutOfRangeError) as caught:
            compiled(TABLE, *args)
        text = str(caught.value)
        assert text.startswith(f"index out of range in dimension 0 of [6, 4]: aten.{op}"), text
        assert re.search(rf" at \S+{Path(__file__).name}:\d+ in look_up", text), text
    assert_same(compiled(TABLE, good, good), look_up(TABLE, good, good))


def test_a_promise_fails_and_all_that_follows(
    compile_function: Callable[..., Any], target: str
) -> None:
    """Nothing waits between the regions; whoever waits, for whichever result, is told."""
    given = torch.tensor([1, 5])
    first = compile_function(lambda w, i: F.embedding(i, w), TABLE, given, target=target)
    second = compile_function(lambda x: x.relu() + 1, torch.randn(2, 4), target=target)
    look_up = first.executables["region0"].functions["main"]
    go_on = second.executables["region0"].functions["main"]
    device = open_device(target)
    with npu_iree.copy_budget(h2d=2, d2h=0, waits=0), device.hold():
        (made,) = look_up(device.put(TABLE), device.put(given + 1))
        later = [made]
        for _ in range(40):
            later += go_on(later[-1])
    for handle in (later[-1], later[7], made):
        with pytest.raises(IndexOutOfRangeError, match="embedding"):
            handle.to_host()
    with pytest.raises(IndexOutOfRangeError, match="embedding"):
        go_on(later[-1])[0].wait()
    (right,) = go_on(device.put(torch.ones(2, 4)))
    assert right.to_host().tolist() == [[2] * 4] * 2


def test_the_check_is_no_copy_where_memory_is_one() -> None:
    compiled = torch.compile(lambda w, i: w[i] * 2, backend="npu_iree")
    given = torch.tensor([1, 2])
    compiled(TABLE, given)
    with npu_iree.record_transfers() as ledger:
        compiled(TABLE, given)
    assert ledger.copies() == []
    assert len(ledger.waits) == 1


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.places = nn.Embedding(3, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens) + self.places(torch.arange(tokens.shape[-1]))


@pytest.mark.parametrize("target", LOCAL_FIRST)
def test_an_artifact_checks_what_it_is_called_with(tmp_path: Path, target: str) -> None:
    model, good = _Tokens(), torch.tensor([[0, 5, 1]])
    exported = torch.export.export(model, (good,))
    write_artifact({"main": exported}, tmp_path / "tokens.vmfb", BuildOptions(target=target))
    loaded = npu_iree.load(tmp_path / "tokens.vmfb", target)
    assert_same(loaded(good), model(good))
    with pytest.raises(IndexOutOfRangeError, match=r"dimension 0 of \[6, 4\]: aten.embedding"):
        loaded(good + 1)
    assert_same(loaded(good), model(good))


def test_training_is_checked_both_ways() -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3))
    compiled = torch.compile(model, backend="npu_iree")
    for tokens, labels in (([1, 6], [0, 2]), ([1, 2], [0, 3])):
        with pytest.raises(IndexError):
            F.cross_entropy(compiled(torch.tensor(tokens)), torch.tensor(labels)).backward()
    F.cross_entropy(compiled(torch.tensor([1, 1])), torch.tensor([0, 2])).backward()
    ours, model[0].weight.grad = model[0].weight.grad, None
    F.cross_entropy(model(torch.tensor([1, 1])), torch.tensor([0, 2])).backward()
    assert_same(ours, model[0].weight.grad)


def regions(function: Callable[..., Any], *args: Any) -> list[Region]:
    graph = make_fx(function, decomposition_table=decomposition_table())(*args)
    _, plan = compiler_for(Options.parse({})).plan(capture_aot(graph))
    return list(plan.regions.values())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.embedding(torch.arange(4), x) * 2,
        lambda x: x.gather(1, x.argmax(1, keepdim=True)) * 2,
        lambda x: x.gather(1, x.topk(2).indices).exp(),
        lambda x: x[torch.arange(4) - 4].exp(),
        lambda x: F.interpolate(x.view(1, 1, 6, 4), scale_factor=2, mode="nearest").exp(),
        lambda x: F.interpolate(x.view(1, 1, 6, 4), scale_factor=2, mode="bilinear").exp(),
        lambda x: F.pad(x.view(1, 6, 4), (2, 1), mode="reflect").exp(),
        lambda x: F.pad(x.view(1, 6, 4), (2, 1), mode="replicate").exp(),
    ],
)
def test_what_cannot_leave_is_not_checked(function: Callable[..., Any]) -> None:
    found = regions(function, TABLE)
    assert [region.signature.checks for region in found] == [()]


def test_one_check_serves_all_that_take_the_same() -> None:
    """As the layers of a model with a cache do, each of which writes at the same place."""

    def step(caches: list[Tensor], row: Tensor, at: Tensor) -> list[Tensor]:
        return [cache.index_copy(1, at, row + i) for i, cache in enumerate(caches)]

    caches = [torch.zeros(2, 8, 4) for _ in range(5)]
    (region,) = regions(step, caches, torch.ones(2, 1, 4), torch.tensor([3]))
    assert len(region.signature.checks) == 1

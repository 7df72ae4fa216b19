"""Calls of a loaded artifact: arguments, results and states are the model's own."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import npu_iree
from command import invoke
from models.small import (
    Cache,
    CopiesIn,
    Named,
    Point,
    ReadsRows,
    Remembers,
    Rows,
    SetsTwo,
    SmallModel,
    Unknown,
    cached,
    compiled,
    seeded,
    signatures,
    sized,
)
from npu_iree.offline.load import LoadedProgram
from npu_iree.offline.trees import read_tree
from tolerances import assert_same


@pytest.fixture
def program(signatures_artifact: Path, target: str) -> LoadedProgram:
    return npu_iree.load(signatures_artifact, target)


@pytest.fixture
def cache(cache_artifact: Path, target: str) -> LoadedProgram:
    return npu_iree.load(cache_artifact, target)


@pytest.fixture
def eager_cache() -> Cache:
    return cached()["step"].model


def eager(model: SmallModel, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model.model(*args, **kwargs)


@pytest.mark.slow
def test_a_call_is_the_models(program: LoadedProgram) -> None:
    models = signatures()
    assert [*program.entries] == [*models]
    for name, model in models.items():
        mine, its = copy.deepcopy((model.args, model.kwargs)), (model.args, dict(model.kwargs))
        expected, actual = eager(model, *its[0], **its[1]), program[name](*mine[0], **mine[1])
        assert type(actual) is type(expected), name
        assert_same(actual, expected)
        for one, other in zip(tensors(actual), tensors(expected), strict=True):
            assert one.stride() == other.stride(), name
        for one, other in zip(tensors(mine), tensors(its), strict=True):
            assert torch.equal(one, other), name  # a call writes to an argument if the model does


def tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def test_named_tuples_and_whole_numbers_as_keys_come_back_as_what_they_are(
    program: LoadedProgram,
) -> None:
    model = signatures()["nested"]
    result = program.nested(*model.args)
    assert isinstance(result["point"], Point)
    assert isinstance(result["unknown"], Unknown)
    assert [*result["levels"]] == [1, 0]
    batch, point = model.args
    again = program.nested(batch, tuple(point))  # any tuple of two will do
    assert_same(again["point"], tuple(result["point"]))


def test_a_program_stays_in_its_process(program: LoadedProgram) -> None:
    for value in (program, program["outputs"], program.device):
        with pytest.raises(TypeError, match=r"is of this process.*the paths of artifacts"):
            pickle.dumps(value)


@pytest.mark.parametrize("size", [1, 5, 9])
def test_results_that_no_device_computes(size: int, program: LoadedProgram) -> None:
    x = torch.ones(size, 2)
    result = program.outputs(x, 3, True)
    assert result[0] is x
    assert result[1:5] == (None, 7, size, 2 * size + 1)
    assert result[6:] == (1.5, True, size**2)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((torch.ones(10, 2), 3, True), "dimension 0 of x is 10, and the artifact is for 1 to 9"),
        ((torch.ones(0, 2), 3, True), "dimension 0 of x is 0"),
        ((torch.ones(5, 3), 3, True), "dimension 1 of x is 3, not 2"),
        ((torch.ones(5, 2), 4, True), "n was compiled in as 3, and cannot be 4"),
        ((torch.ones(5, 2), 3, 1), "flag was compiled in as True, and cannot be 1"),
        ((torch.ones(5, 2).double(), 3, True), "x is f64, and was compiled for f32"),
        ((torch.ones(5, 2, device="meta"), 3, True), "x is on meta"),
        (([1.0], 3, True), "outputs: x is a tensor, not list"),
        ((torch.eye(5, 2).to_sparse(), 3, True), "x is torch.sparse_coo; give a dense tensor"),
        ((torch.ones(5, 2), torch.ones(4), True), "n was compiled in as 3"),
        ((torch.ones(5, 2), 3), "missing flag. It takes x, n, flag"),
        ((torch.ones(5, 2), 3, True, 1), "takes 3 arguments, not 4"),
    ],
)
def test_wrong_arguments_are_told(
    args: tuple[Any, ...], reason: str, program: LoadedProgram
) -> None:
    with npu_iree.record_transfers() as ledger, pytest.raises(npu_iree.ArgumentError) as raised:
        program.outputs(*args)
    assert reason in str(raised.value)
    assert ledger.entries == []


def resized(
    held_bytes: int, rows: int, columns: int, strides: tuple[int, int] = (2, 1)
) -> torch.Tensor:
    tensor = torch.empty_strided((rows, columns), strides)
    tensor.untyped_storage().resize_(held_bytes)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (TwoTensor(torch.ones(5, 2), torch.ones(5, 2)), "TwoTensor, which has no memory of"),
        (resized(0, 5, 2), "more elements than its storage holds"),
        (resized(36, 5, 2), "more elements than its storage holds"),
        (resized(36, 5, 2, strides=(1, 5)), "more elements than its storage holds"),
        (FakeTensorMode().from_tensor(torch.ones(5, 2)), "is a fake tensor"),
        (torch.nested.as_nested_tensor([torch.ones(5, 2)]), "is nested"),
        (torch.ones(5, 2).to_mkldnn(), "is torch._mkldnn; give a dense tensor"),
    ],
)
def test_tensors_that_are_no_memory_are_refused(
    tensor: torch.Tensor, reason: str, program: LoadedProgram
) -> None:
    for call in (program.outputs, program.outputs.submit):
        with pytest.raises(npu_iree.ArgumentError, match=f"outputs: x .*{reason}"):
            call(tensor, 3, True)
    with pytest.raises(npu_iree.ArgumentError, match=reason):
        program.device.put(tensor)


def test_transforms_of_functions_are_refused(program: LoadedProgram) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = program.outputs(x, 3, True)[0]
        return first.sum()

    x = torch.ones(5, 2)
    transformed = [
        lambda: torch.func.vmap(call)(x[None]),
        lambda: torch.func.grad(call)(x),
        lambda: torch.func.jvp(call, (x,), (x,)),
        lambda: torch.func.functionalize(call)(x),
    ]
    for run in transformed:
        with pytest.raises(npu_iree.ArgumentError, match=r"x is of a transform of torch\.func"):
            run()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(npu_iree.ArgumentError, match="x has a tangent of forward-mode AD"):
            call(dual)
        assert call(forward_ad.unpack_dual(dual).primal) == call(x)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_call_in_a_compiled_function_breaks_the_graph(is_named: bool, net: Path) -> None:
    torch._dynamo.reset()
    program, x = npu_iree.load(net), torch.ones(2, 4)
    call = program.main if is_named else program

    def doubled(x: torch.Tensor) -> torch.Tensor:
        handle = program.device.put(x)
        later: torch.Tensor = call.submit(handle).to_host()
        result: torch.Tensor = call(x + 0)
        return result + later

    counter = CompileCounter()
    for _ in range(2):
        assert_same(torch.compile(doubled, backend=counter)(x), 2 * program(x))
    assert counter.op_count == 2  # both sums, and nothing of what is between them
    with pytest.raises(torch._dynamo.exc.Unsupported, match="program that is compiled already"):
        torch.compile(doubled, backend="eager", fullgraph=True)(x)


def test_sizes_are_what_the_program_takes_for_granted(tmp_path: Path) -> None:
    models = sized()
    program = npu_iree.load(compiled(models, tmp_path / "sized.vmfb"))
    right = {
        "derived": (seeded(6, 4),),
        "hinted": (seeded(4, 4),),
        "late": (seeded(6, 4), seeded(3, 4)),
        "counted": (seeded(7), 7, 3),
        "odd": (seeded(7),),
        "bits": (seeded(8),),
        "squeezed": (seeded(2, 1, 3),),
    }
    for name, args in right.items():
        assert_same(program[name](*args), models[name].model(*args))
    wrong: list[tuple[str, tuple[Any, ...], str]] = [
        ("derived", (seeded(7, 4),), "dimension 0 of x is 7, which no whole"),
        ("derived", (seeded(400, 4),), "as dimension 0 of x, is 200, and the artifact is for 2 to"),
        ("hinted", (seeded(7, 4),), "the artifact is for sizes with Eq(Mod("),
        ("hinted", (seeded(2, 4),), "the artifact is for sizes with Ne("),  # as torch.export says
        ("late", (seeded(6, 4), seeded(4, 4)), "dimension 0 of x is 6, not 8"),
        ("counted", (seeded(7), 6, 3), "n is 6, not 7"),
        ("counted", (seeded(7), 7, 9), "step is 9, and the artifact is for 3 to 8"),
        ("counted", (seeded(7), 7, 2**63), "step is a number of 64 bits, which do not hold 922"),
        ("odd", (seeded(6),), "the artifact is for sizes with Ne(Mod("),
        ("bits", (seeded(7),), "the artifact is for sizes with Eq(BitwiseFn"),
        ("squeezed", (seeded(1, 1, 3),), "is 1, and the artifact is for 2 or more"),
    ]
    for name, args, reason in wrong:
        with pytest.raises(npu_iree.ArgumentError, match=re.escape(reason)):
            program[name](*args)


def test_arguments_by_position_and_by_name(program: LoadedProgram) -> None:
    x, y, scale = torch.ones(3), torch.zeros(3), torch.tensor(4.0)
    expected = program.keywords(x, y, scale=scale)
    assert_same(program.keywords(x, scale=scale, y=y), expected)
    assert_same(program.keywords(scale=scale, y=y, x=x), expected)
    for args, kwargs, reason in (
        ((x, y), {"scale": scale, "y": y}, "y is given twice"),
        ((x, y), {"scale": scale, "z": y}, "no argument z"),
        ((x, y), {}, "missing scale"),
    ):
        with pytest.raises(npu_iree.ArgumentError, match=reason):
            program.keywords(*args, **kwargs)


def test_a_wrong_structure_is_told_with_its_place(program: LoadedProgram) -> None:
    batch, point = signatures()["nested"].args
    for wrong, reason in (
        ({**batch, "more": 1}, "extra 'more'"),
        ({"first": batch["first"]}, r"\[batch\]: missing 'rest'$"),
        ({"first": batch["first"], "more": 1}, "missing 'rest'; extra 'more'$"),
        ({**batch, "rest": batch["rest"][:1]}, r"\[batch\]\[rest\] has 1 items, not 2"),
        ([1, 2], r"\[batch\] is no builtins.dict but list"),
    ):
        with pytest.raises(npu_iree.ArgumentError, match=reason):
            program.nested(wrong, point)


def test_a_type_goes_by_the_name_that_it_is_written_with() -> None:
    text = pytree.treespec_dumps(pytree.tree_structure(Named(1, 2)))
    assert [*read_tree(text).flatten(Named(3, 4))] == [3, 4]


def test_handles_go_in_and_come_out(program: LoadedProgram) -> None:
    x, y = signatures()["writes_input"].args
    with pytest.raises(npu_iree.ArgumentError, match="writes to an argument"):
        program.writes_input.submit(x, y)
    handle = program.device.put(torch.tensor(2.5))
    (one, total) = program.zero_d.submit(handle)
    assert isinstance(one, npu_iree.DeviceArray)
    assert_same([one.to_host(), total.to_host()], list(program.zero_d(handle)))
    assert_same(one.to_host(), torch.tensor(3.5))


def test_a_handle_of_another_device_is_refused(program: LoadedProgram, target: str) -> None:
    other = npu_iree.open_device({"npu-local": "npu-virtual", "npu-virtual": "npu-local"}[target])
    with pytest.raises(npu_iree.ArgumentError, match="x is on"):
        program.zero_d(other.put(torch.tensor(1.0)))


def test_what_a_call_cannot_write_to_alone_is_refused(program: LoadedProgram) -> None:
    handle, x = program.device.put(torch.ones(3)), torch.ones(6)
    for args, reason in (
        ((handle, torch.ones(3)), "x is a handle"),
        ((x[:3], x[2:5]), "x shares memory with y"),
        ((torch.from_numpy(x.numpy()[2:5]), x[:3]), "x shares memory with y"),
        ((torch.ones(1).expand(3), torch.ones(3)), "x has several elements in one place"),
        ((torch.ones(3, requires_grad=True), torch.ones(3)), "x requires a gradient"),
    ):
        with pytest.raises(npu_iree.ArgumentError, match=reason):
            program.writes_input(*args)
    program.writes_input(x[::2], x[1::2])
    assert x.tolist() == [2, 1, 2, 1, 2, 1]


def test_tied_weights_are_stored_once(program: LoadedProgram) -> None:
    (tied,) = [p for p in program.manifest.parameters if "embed.weight" in (p.name, *p.aliases)]
    assert {tied.name, *tied.aliases} == {"embed.weight", "head.weight"}


def test_a_parameter_that_is_returned_can_be_written_to(program: LoadedProgram) -> None:
    x = torch.ones(2, 3)
    before, scale = program.constants(x)
    scale.mul_(100)
    after, scale = program.constants(x)
    assert torch.equal(before, after)
    assert torch.equal(scale, torch.tensor([2.0, 3.0, 4.0]))


# States.


@torch.no_grad()
def test_a_state_stays_on_the_device(cache: LoadedProgram, eager_cache: Cache, target: str) -> None:
    for i in range(4):
        x = seeded(1, 4) * i
        with npu_iree.record_transfers() as ledger:
            actual = cache.step(x)
        assert_same(actual, eager_cache(x))
        if i > 0:  # the first call puts them there
            assert [e.value for e in ledger.transfers if e.kind == "h2d"] == ["x"]
            back = {e.value for e in ledger.transfers if e.kind == "d2h"}
            assert back == {"result 0", "result 1"} | (
                {"checks"} if target == "npu-virtual" else set()
            )
    keys, count, _ = cache.peek(torch.ones(1))
    assert_same([keys, count], [eager_cache.keys, eager_cache.count])


@torch.no_grad()
def test_a_state_belongs_to_the_device_alone(cache: LoadedProgram, eager_cache: Cache) -> None:
    """What a call returns may be the very memory of a state: writing to it changes no state."""
    x = seeded(1, 4)
    for _ in range(3):
        actual = cache.step(x)
        assert_same(actual, eager_cache(x))
        for result in (*actual, *cache.peek(torch.ones(1))):
            result.fill_(77)
    x = seeded(1, 4)
    for handle in (*cache.step.submit(x), *cache.peek.submit(torch.ones(1))):
        handle.to_host().fill_(77)
    eager_cache(x)
    assert_same(cache.step(x), eager_cache(x))


def test_a_state_that_nobody_has_written_to_is_submitted_as_a_handle(cache: LoadedProgram) -> None:
    keys, *_ = cache.peek.submit(torch.ones(1))
    keys.to_host().fill_(77)
    assert not cache.peek(torch.ones(1))[0].any()


def test_each_load_has_states_of_its_own(cache_artifact: Path, cache: LoadedProgram) -> None:
    x = torch.ones(1, 4)
    cache.step(x)
    other = npu_iree.load(cache_artifact, cache.device)
    assert other.step(x)[1].item() == 1
    assert cache.step(x)[1].item() == 2


@torch.no_grad()
@pytest.mark.parametrize("is_read_first", [False, True])
def test_a_failed_call_leaves_the_state_as_it_was(
    is_read_first: bool, cache: LoadedProgram, eager_cache: Cache
) -> None:
    x = seeded(1, 4)
    if is_read_first:
        assert_same(cache.step(x), eager_cache(x))
    with pytest.raises(npu_iree.ArgumentError):
        cache.step(torch.ones(2, 4))
    with cache.device.hold() as gate:
        pending = [cache.step.submit(x) for _ in range(2)]
        gate.fail("boom")
    for results in pending:
        with pytest.raises(npu_iree.DeviceError, match="boom"):
            results[0].wait()
    assert_same(cache.step(x), eager_cache(x))
    assert_same(cache.step(x), eager_cache(x))


@pytest.mark.usefixtures("shared_cache")
@torch.no_grad()
def test_one_tensor_is_one_whatever_each_entry_point_calls_it(target: str, tmp_path: Path) -> None:
    rows, index = Rows(), torch.tensor([[0, 5, 2, 1]])
    reads, x = ReadsRows(rows), seeded(1, 4)
    models = {"read": SmallModel(reads, (x,)), "write": SmallModel(rows, (index, x))}
    path = compiled(models, tmp_path / "rows.vmfb")
    tuned = {name: value + 1 for name, value in rows.state_dict().items()}  # rows is none of them
    for params in (None, tuned):
        rows.rows.zero_()
        rows.load_state_dict(params or rows.state_dict())
        program = npu_iree.load(path, target, params=params)
        assert program.manifest.states == ("inner.rows",)
        for _ in range(2):
            assert_same(program.write(index, x), rows(index, x))
            found = program.read(x)
            assert_same(found, reads(x))
            for result in found:
                result.fill_(77)
        assert_same(program.read.submit(x)[0].to_host(), rows.rows)


WRITERS = {CopiesIn: 2, Remembers: 1, SetsTwo: 1}  # -> how many arguments


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules of `WRITERS`, as entry points."""
    models = {
        kind.__name__: SmallModel(kind(), tuple(torch.zeros(3) for _ in range(arguments)))
        for kind, arguments in WRITERS.items()
    }
    return compiled(models, tmp_path_factory.mktemp("writers") / "writers.vmfb")


@torch.no_grad()
def test_what_is_written_is_nobody_elses_memory(writers: Path, target: str) -> None:
    """A state that is set to an argument stays what it was when the caller goes on to write."""
    program = npu_iree.load(writers, target)
    for kind, arguments in WRITERS.items():
        model, entry = kind(), program[kind.__name__]
        for step in range(3):
            mine = [torch.arange(3.0) + step + i for i in range(arguments)]
            its = copy.deepcopy(mine)
            expected, actual = model(*its), entry(*mine)
            assert_same(actual, expected)
            assert_same(mine, its)
            for tensor in (*mine, *tensors(actual), *its, *tensors(expected)):
                tensor.fill_(50)


@torch.no_grad()
def test_submitted_calls_follow_each_other(cache: LoadedProgram, eager_cache: Cache) -> None:
    inputs = [seeded(1, 4) * i for i in range(5)]
    pending = [cache.step.submit(x) for x in inputs]
    for x, (total, count) in zip(inputs, pending, strict=True):
        assert_same([total.to_host(), count.to_host()], list(eager_cache(x)))


def test_a_model_with_states_says_which(cache: LoadedProgram) -> None:
    assert cache.manifest.states == ("count", "keys")
    with pytest.raises(npu_iree.ArgumentError, match=r"several entry points \(step, peek\)"):
        cache(torch.ones(1, 4))
    with pytest.raises(npu_iree.ArgumentError, match="no entry point 'stop'"):
        cache["stop"]
    with pytest.raises(AttributeError, match="no 'stop'; its entry points are: step, peek"):
        _ = cache.stop
    assert "npu_iree" in inspect.getmodule(type(cache.step)).__name__


def test_a_file_of_safetensors_is_an_input_and_a_call_that_writes_is_timed(
    signatures_artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """NumPy's files hold no bfloat16."""
    half = seeded(3).bfloat16()
    save_file({"any": half}, tmp_path / "one.safetensors")
    save_file({"other": half, "more": half + 1}, tmp_path / "two.safetensors")
    inputs = [f"--input={name}=@rand" for name in ("double", "long", "mask", "wave")]
    run = ("run", signatures_artifact, "--entry", "dtypes", *inputs)
    output = ("--output", tmp_path / "out.npz")
    done = invoke(monkeypatch, capsys, *run, f"--input=half={tmp_path}/one.safetensors", *output)
    assert done.code == 0, done.err
    found = torch.from_numpy(np.load(tmp_path / "out.npz")["output3"])
    assert_same(found.bfloat16(), half * 3)
    done = invoke(monkeypatch, capsys, *run, f"--input=half={tmp_path}/two.safetensors")
    assert (done.code, "it has no such tensor" in done.err) == (9, True)
    bench = ("bench", signatures_artifact, "--entry", "writes_input", "--calls", "2", "--json")
    figures = invoke(monkeypatch, capsys, *bench).json()
    assert figures["in_flight"] == 1
    assert figures["calls_per_second"] > 0

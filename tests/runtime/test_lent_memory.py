"""Calls compute on memory that stays, whatever is under way beside them."""

from __future__ import annotations

import copy
import gc
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from iree.runtime import _binding as hal

import npu_iree
from either import LOCAL_FIRST
from npu_iree.executable import Executable
from npu_iree.runner import Runner
from programs.launch import wait_until
from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")

MIB = 1 << 20
Function = Callable[[torch.Tensor], torch.Tensor]
Compile = Callable[..., Runner]


def chain(x: torch.Tensor) -> torch.Tensor:
    """On the way, 4 MiB at a time are needed."""
    return ((x @ x / 32).relu() @ x / 32).amax(0)


def short_chain(x: torch.Tensor) -> torch.Tensor:
    return (x[:, :512] @ x[:512] / 32).relu().amax(0).sort().values


@pytest.fixture(params=["npu-local", "npu-virtual"])
def device(request: pytest.FixtureRequest) -> npu_iree.Device:
    gc.collect()
    opened = npu_iree.open_device(request.param)
    opened.arenas.release()
    return opened


def executable_of(runner: Runner) -> Executable:
    (executable,) = runner.executables.values()
    return executable


def compiled(function: Function, device: npu_iree.Device) -> Function:
    return torch.compile(function, backend="npu_iree", options={"target": device.target.name})


def images() -> list[torch.Tensor]:
    return [torch.randn(1024, 1024) for _ in range(3)]


@pytest.mark.slow
def test_calls_have_the_same_memory(device: npu_iree.Device) -> None:
    fast = compiled(chain, device)
    held = device.arenas.nbytes
    for x in images():
        assert_same(fast(x), chain(x))
        assert device.arenas.nbytes >= held + 4 * MIB
    first = device.arenas.nbytes
    for x in images():
        assert_same(fast(x), chain(x))
    assert device.arenas.nbytes == first


@pytest.mark.parametrize("device", LOCAL_FIRST, indirect=True)
def test_graphs_share_memory(device: npu_iree.Device) -> None:
    fast, other = compiled(chain, device), compiled(short_chain, device)
    x, *_ = images()
    assert_same(fast(x), chain(x))
    first = device.arenas.nbytes
    assert_same(other(x), short_chain(x))
    assert_same(fast(x), chain(x))
    assert device.arenas.nbytes == first


def test_calls_under_way_at_once_have_memory_of_their_own(
    device: npu_iree.Device, compile_function: Compile
) -> None:
    """One that waits holds none that the other would need."""
    x = images()[0]
    executable = executable_of(compile_function(chain, x, target=device.target.name))
    function = executable.functions["main"]
    handles = [device.put(value) for value in (x, 2 * x)] * 4
    device.synchronize()
    function(handles[0])[0].wait()
    lent = []
    with device.hold():
        held = []
        for handle in handles:
            held += function(handle)
            lent.append(executable._lender._lent)
    assert len({*filter(None, lent)}) == len([*filter(None, lent)]) >= 1
    later = [function(handle)[0] for handle in handles]
    expected = [chain(x), chain(2 * x)] * 8
    for handle, value in zip([*held, *later], expected, strict=True):
        assert_same(handle.to_host(timeout_s=30), value)


@pytest.mark.parametrize("device", LOCAL_FIRST, indirect=True)
def test_memory_is_in_use_though_what_follows_has_ended(
    device: npu_iree.Device, compile_function: Compile
) -> None:
    """What folds to a constant ends before what it waits for: a third call waits for the first."""

    def whole(x: torch.Tensor) -> torch.Tensor:
        return (chain(x) * 1000).to(torch.int32)

    def nothing(whole: torch.Tensor) -> torch.Tensor:
        return whole * 0

    def beside(x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return chain(x) + whole

    x = images()[0][:512, :512].contiguous()
    numbers, zeros, sums = whole(x), nothing(whole(x)), beside(2 * x, nothing(whole(x)))
    compiled_first = compile_function(whole, x, target=device.target.name)
    compiled_last = compile_function(beside, x, zeros, target=device.target.name)
    first, last = executable_of(compiled_first), executable_of(compiled_last)
    middle = executable_of(compile_function(nothing, zeros, target=device.target.name))
    handles = [device.put(2 * x), device.put(x)]
    device.synchronize()
    gate = device.gate()
    handles[1].ready = gate.point
    (one,) = first.functions["main"](handles[1])
    (two,) = middle.functions["main"](one)
    (three,) = last.functions["main"](handles[0], two)
    two.wait(timeout_s=30)
    assert last._lender._lent is first._lender._lent is not None
    with pytest.raises(npu_iree.DeviceTimeoutError):
        three.wait(timeout_s=0.5)
    gate.open()
    assert_same(three.to_host(timeout_s=30), sums)
    assert_same(one.to_host(timeout_s=30), numbers)


@pytest.mark.parametrize("device", LOCAL_FIRST, indirect=True)
def test_a_refused_call_leaves_nothing_lent(
    device: npu_iree.Device, compile_function: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = images()[0]
    executable = executable_of(compile_function(chain, x, target=device.target.name))
    function, handle, wrong = executable.functions["main"], device.put(x), device.put(x[:1])
    handle.wait()
    before = device.arenas.nbytes
    with pytest.raises(ValueError, match="shape"):
        function(wrong)
    assert device.arenas.nbytes == before
    assert_same(function(handle)[0].to_host(timeout_s=30), chain(x))
    before = device.arenas.nbytes

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(executable, "note", fail)
        with pytest.raises(MemoryError):
            function(handle)
    assert_same(function(handle)[0].to_host(timeout_s=30), chain(x))
    assert device.arenas.nbytes == before


@pytest.mark.parametrize("device", LOCAL_FIRST, indirect=True)
def test_a_call_beside_a_load_uses_nothing_that_others_have(
    device: npu_iree.Device, compile_function: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the choice of a lane and the submission, another thread may bind weights anew."""
    x = images()[0]
    executable = executable_of(compile_function(chain, x, target=device.target.name))
    function, handle = executable.functions["main"], device.put(x)
    function(handle)[0].wait()
    choose = executable._lane

    def choose_then_load(*args: Any) -> Any:
        lane = choose(*args)
        executable.load(None)
        return lane

    monkeypatch.setattr(executable, "_lane", choose_then_load)
    (result,) = function(handle)
    device.arenas.release()
    (other,) = function(device.put(2 * x))
    assert_same(result.to_host(timeout_s=30), chain(x))
    assert_same(other.to_host(timeout_s=30), chain(2 * x))


def test_a_chain_of_calls_has_one_arena(device: npu_iree.Device, compile_function: Compile) -> None:
    """Each waits for the one before, so they may all be submitted at once."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return (x @ x / 32).relu() @ x / 32

    x = images()[0] / 4
    executable = executable_of(compile_function(step, x, target=device.target.name))
    handle = device.put(x)
    handle.wait()
    expected = x
    for _ in range(6):
        (handle,) = executable.functions["main"](handle)
        expected = step(expected)
    assert len(executable._lender._arenas) == 1
    assert_same(handle.to_host(timeout_s=30), expected)


@pytest.mark.parametrize("device", LOCAL_FIRST, indirect=True)
def test_memory_goes_with_what_was_compiled(device: npu_iree.Device) -> None:
    before = device.arenas.nbytes
    fast = compiled(chain, device)
    fast(images()[0])
    assert device.arenas.nbytes > before
    del fast
    torch._dynamo.reset()
    gc.collect()
    assert device.arenas.nbytes == before


@pytest.mark.parametrize("device", LOCAL_FIRST, indirect=True)
def test_released_memory_is_there_again_in_the_next_call(device: npu_iree.Device) -> None:
    fast, (x, y, _) = compiled(chain, device), images()
    assert_same(fast(x), chain(x))
    device.arenas.release()
    assert device.arenas.nbytes == 0
    assert_same(fast(y), chain(y))
    assert device.arenas.nbytes >= 4 * MIB


def several(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is returned takes 8 MiB, and lies side by side."""
    product = x @ x / 32
    return product, product.relu() + x, product.amax(0)


@pytest.fixture
def local() -> npu_iree.Device:
    gc.collect()
    opened = npu_iree.open_device("npu-local")
    opened.blocks.release()
    return opened


def wait_until_lent(device: npu_iree.Device, nbytes: int) -> None:
    """The device lets go of a result a moment after it is there."""
    wait_until(lambda: device.blocks.lent_bytes == nbytes)


def test_results_have_the_memory_of_those_that_are_gone(local: npu_iree.Device) -> None:
    fast, before = compiled(several, local), local.blocks.lent_bytes
    addresses = set()
    for x in images():
        results = fast(x)
        addresses.add(results[0].data_ptr())
        assert_same(results, several(x))
        assert local.blocks.lent_bytes >= before + 8 * MIB
        del results
        wait_until_lent(local, before)
    assert len(addresses) == 1


def test_results_that_somebody_holds_stay_as_they_are(local: npu_iree.Device) -> None:
    """One of several, a view of one, an array of NumPy's: the others' memory lies beside."""
    fast, inputs = compiled(several, local), images()
    last = fast(inputs[0])[2]
    part = fast(inputs[1])[1][3:5, ::7]
    array = fast(inputs[2])[0].numpy()
    for x in [*images(), *images()]:
        assert_same(fast(x), several(x))
    assert_same(last, several(inputs[0])[2])
    assert_same(part, several(inputs[1])[1][3:5, ::7])
    assert_same(torch.from_numpy(array), several(inputs[2])[0])


def test_results_that_are_written_to_are_the_callers(local: npu_iree.Device) -> None:
    fast, (x, y, _) = compiled(several, local), images()
    first = fast(x)[0]
    first.zero_()
    assert_same(fast(y), several(y))
    assert not first.any()


def test_results_of_calls_under_way_at_once_have_memory_of_their_own(
    local: npu_iree.Device, compile_function: Compile
) -> None:
    x = images()[0]
    function = executable_of(compile_function(several, x)).functions["main"]
    handles = [local.put(value) for value in (x, 2 * x)]
    with local.hold():
        calls = [function(handle) for handle in handles * 3]
        for call in calls[2:4]:
            call.clear()  # nobody wants them any more; the device does, until it is done
        calls += [function(handle) for handle in handles]
    for call, value in zip(calls, [x, 2 * x] * 4, strict=True):
        for handle, expected in zip(call, several(value), strict=False):
            assert_same(handle.to_host(timeout_s=30), expected)


def test_a_refused_call_holds_no_memory_for_results(
    local: npu_iree.Device, compile_function: Compile
) -> None:
    x = images()[0]
    function = executable_of(compile_function(several, x)).functions["main"]
    handle, wrong, before = local.put(x), local.put(x[:1]), local.blocks.lent_bytes
    address = function(handle)[0].to_host(timeout_s=30).data_ptr()
    wait_until_lent(local, before)
    for _ in range(3):
        with pytest.raises(ValueError, match="shape"):
            function(wrong)
        assert local.blocks.lent_bytes == before
    result = function(handle)[0].to_host(timeout_s=30)
    assert result.data_ptr() == address
    assert_same(result, several(x)[0])


def test_results_outlive_what_was_compiled(local: npu_iree.Device) -> None:
    before = local.blocks.lent_bytes
    fast, (x, *_) = compiled(several, local), images()
    product = fast(x)[0]
    del fast
    torch._dynamo.reset()
    gc.collect()
    assert local.blocks.lent_bytes >= before + 8 * MIB
    assert_same(product, several(x)[0])
    del product
    wait_until_lent(local, before)
    gc.collect()
    assert local.blocks.nbytes == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_results_are_there_in_a_forked_child(local: npu_iree.Device) -> None:
    """A loader's workers, say, may have the results of a call."""
    before = local.blocks.lent_bytes
    array = compiled(several, local)(images()[0])[0].numpy()  # no threads, which a child lacks
    total = array.sum()
    assert local.blocks.lent_bytes >= before + 8 * MIB
    if not (child := os.fork()):
        try:
            os._exit(0 if array.sum() == total else 1)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_gradients_stay_from_step_to_step(local: npu_iree.Device) -> None:
    """What was saved for one step's backward pass is the next one's memory; gradients add up."""
    layers = [torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024)]
    eager = torch.nn.Sequential(*layers)
    model = copy.deepcopy(eager)
    fast = torch.compile(model, backend="npu_iree")
    for step, x in enumerate(images()):
        for module in (eager, fast):
            (module(x) ** 2).mean().backward()
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert_same(mine.grad, other.grad)
        if step == 1:
            for module in (eager, model):
                module.zero_grad()


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_released_memory_is_the_systems() -> None:
    device = npu_iree.open_device("npu-local")
    buffer, release = device.memory.reserve(64 * MIB)
    view = hal.HalBufferView(buffer, [64 * MIB], int(hal.HalElementType.UINT_8))
    tensor = device.as_tensor(view, torch.uint8).fill_(1)
    before = resident()
    release()
    assert resident() < before - 60 * MIB
    assert tensor.sum() == 0


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_loss_and_logits_that_are_kept_keep_no_activations() -> None:
    wide, narrow = torch.nn.Linear(256, 256), torch.nn.Linear(256, 10)
    model = torch.nn.Sequential(wide, torch.nn.GELU(), wide, torch.nn.GELU(), narrow)
    x = torch.randn(2048, 256)

    def loss(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(x)
        return logits.square().mean(), logits

    fast = torch.compile(loss, backend="npu_iree")
    kept = []
    for step in range(25):
        found, logits = fast(x)
        found.backward()
        kept.append((found.detach(), logits.detach()))
        if step == 4:
            before = resident()
    assert resident() - before < 40 << 20, "each would keep 6 MB or more"
    assert len({float(value) for value, _ in kept}) == 1

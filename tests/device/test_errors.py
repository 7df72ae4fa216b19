"""Errors are PyTorch's, or say what failed where; the device goes on after each."""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Callable

import pytest
import torch

import npu_iree
from npu_iree.device import Device

NPU = "npu"


@pytest.fixture(autouse=True)
def _goes_on() -> object:
    yield
    assert (torch.ones(3, device=NPU) + 1).tolist() == [2, 2, 2]


def test_tensors_of_two_devices() -> None:
    with pytest.raises(RuntimeError, match="at least two devices, npu:0 and cpu"):
        torch.ones(3, device=NPU) + torch.ones(3)
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.equal(torch.ones(3, device=NPU), torch.ones(3))


def test_indices_on_the_device_move_no_tensor_of_the_cpu() -> None:
    table, index = torch.arange(12.0).view(4, 3), torch.tensor([1, 2], device=NPU)
    for look in (lambda: table[index], lambda: torch.index_select(table, 0, index)):
        with pytest.raises(RuntimeError, match="at least two devices, cpu and npu:0"):
            look()


def test_there_is_one_device() -> None:
    for make in (
        lambda: torch.empty(2, device="npu:1"),
        lambda: torch.ones(2).to("npu:1"),
        lambda: torch.tril_indices(2, 2, device="npu:1"),
        lambda: torch.UntypedStorage(3, device="npu:1"),
        lambda: torch.ones(2).untyped_storage().to(device="npu:1"),
    ):
        with pytest.raises(RuntimeError, match="npu:1 is no such device"):
            make()


_OVERLAPPING: list[Callable[[torch.Tensor], object]] = [
    lambda x: x[:1].expand(4).add_(1),
    lambda x: x[:2].expand(2, 2).copy_(torch.ones(2, 2, device=x.device)),
    lambda x: x[1:].add_(x[:-1]),
    lambda x: x[1:].copy_(x[:-1]),
    lambda x: x.sub_(x[0]),
    lambda x: torch.mul(x[:3], 2, out=x[1:4]),
    lambda x: x.index_put_((torch.tensor([0, 1], device=x.device),), x[1:3]),
    lambda x: x.index_put_((torch.arange(5, device=x.device),), x),
    lambda x: x.view(torch.bool)[1:].masked_fill_(x.view(torch.bool)[:-1], True),
]


@pytest.mark.parametrize("where", ["cpu", NPU])
def test_writes_that_overlap_are_refused_and_those_that_may_are_made(where: str) -> None:
    x = torch.arange(5.0, device=where)
    for write in _OVERLAPPING:
        with pytest.raises(RuntimeError, match=r"refers? to a single memory location"):
            write(x)
    assert x.tolist() == [0, 1, 2, 3, 4]
    x[:1].expand(3).fill_(7)
    x[3:].copy_(x[:2])
    x[:2].add_(x[2:4])
    x.add_(x)
    assert x.tolist() == [18, 16, 4, 14, 2]


_REFUSED: list[Callable[[str], object]] = [
    lambda where: torch.empty(2, -3, device=where),
    lambda where: torch.empty_strided((2,), (-1,), device=where),
    lambda where: torch.zeros(2, dtype=torch.int8).to(where).fill_(300),
    lambda where: torch.zeros(2, dtype=torch.int64).to(where).fill_(float("nan")),
    lambda where: torch.full((2,), 1e5, dtype=torch.float16, device=where),
    lambda where: (
        torch.zeros(2, dtype=torch.int8)
        .to(where)
        .masked_fill(torch.ones(2, dtype=torch.bool).to(where), 300)
    ),
    lambda where: torch.ones(2, dtype=torch.uint8).to(where).clamp(max=300),
    lambda where: torch.ones(2).to(where).addcdiv(*torch.ones(2, 2).long().to(where)),
    lambda where: torch.add(*torch.ones(2, 2).long().to(where), alpha=0.5),
    lambda where: torch.addcmul(*torch.ones(3, 2, dtype=torch.int8).to(where), value=300),
    lambda where: torch.sub(*torch.ones(2, 2, dtype=torch.int8).to(where), alpha=300),
    lambda where: torch.add(torch.ones(2, dtype=torch.int8).to(where), 2, alpha=300),
    lambda where: torch.lerp(*torch.ones(2, 2).to(where), 1e39),
    lambda where: torch.mm(*torch.ones(2, 2, 2).to(where), out=torch.ones(2, 2).double().to(where)),
    lambda where: torch.ones(2, 3).to(where).softmax(5),
    lambda where: torch.ones(2, 3).to(where).sort(-3),
    lambda where: torch.ones(2, 3).to(where)[:0].max(),
    lambda where: torch.ones(2, 3).to(where)[:, :0].min(),
    lambda where: torch.nn.functional.smooth_l1_loss(*torch.ones(2, 3).to(where), beta=-1.0),
]


def _error_of(call: Callable[[str], object], where: str) -> str:
    """Say what a call fails with; nothing, where it does not."""
    try:
        call(where)
    except (RuntimeError, IndexError) as error:
        return f"{type(error)}: {error}"
    return ""


def test_what_the_cpu_refuses_is_refused_in_its_words() -> None:
    for case, refused in enumerate(_REFUSED):
        expected = _error_of(refused, "cpu")
        assert expected, f"case {case}"
        assert _error_of(refused, NPU) == expected, f"case {case}"


def test_nothing_is_written_to_the_cpu_that_was_not_asked_for_by_a_copy() -> None:
    x, total, out = torch.ones(3, device=NPU), torch.tensor(0.0), torch.empty(0)
    with pytest.raises(RuntimeError, match="at least two devices, cpu and npu:0"):
        total += x[0]
    with pytest.raises(RuntimeError, match="at least two devices, cpu and npu:0"):
        torch.add(x, x, out=out)
    assert (total.item(), out.shape) == (0, (0,))


def test_what_is_on_the_cpu_is_not_written_to_the_device_unasked() -> None:
    x, out = torch.ones(3), torch.zeros(3, device=NPU)
    for write in (torch.exp, lambda x, out: torch.sum(x[None], 0, out=out)):
        with pytest.raises(RuntimeError, match="at least two devices, npu:0 and cpu"):
            write(x, out=out)
    assert torch.mul(x[0], 2, out=out[0]).item() == 2  # of no dimension, PyTorch takes it anywhere
    assert out.tolist() == [2, 0, 0]


def test_what_is_asserted() -> None:
    x = torch.ones(3, device=NPU)
    torch._assert_async((x > 0).all(), "x is positive")
    with pytest.raises(RuntimeError, match="x is positive"):
        torch._assert_async((x < 0).all(), "x is positive")
    with pytest.raises(RuntimeError, match="elements of input should be between 0 and 1"):
        torch.nn.functional.binary_cross_entropy(x * 2, x).item()


def test_shapes_that_do_not_fit_are_pytorchs_errors() -> None:
    a = torch.ones(3, 4, device=NPU)
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied"):
        a @ a
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        a.add_(torch.ones(2, 3, 4, device=NPU))
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
        torch.ones(3, device=NPU, dtype=torch.int64).add_(torch.ones(3, device=NPU))
    with pytest.raises(IndexError, match="out of range"):
        a.sum(5)
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
        a.numpy()
    assert a.tolist() == [[1] * 4] * 3


_X = torch.ones(3, 4)
_UNFIT: list[Callable[[str], object]] = [
    lambda where: torch.bmm(*torch.ones(2, 1, 3, 4).to(where)),
    lambda where: torch.addmm(*torch.ones(3, 3, 4).to(where)),
    lambda where: _X.to(where) + torch.ones(3, 3).to(where),
    lambda where: torch.cat([_X.to(where), torch.ones(4).to(where)]),
    lambda where: torch.stack([_X.to(where), torch.ones(2, 4).to(where)]),
    lambda where: torch.conv2d(torch.ones(1, 2, 5, 5).to(where), torch.ones(2, 3, 3, 3).to(where)),
    lambda where: _X.to(where).index_put_((torch.ones(2).long().to(where),), (_X + 1).to(where)),
    lambda where: torch.ones(3, 3).to(where) @ torch.ones(3, 3).double().to(where),
    lambda where: torch.ones(3, 3).long().to(where) @ torch.ones(3, 3).to(where),
    lambda where: _X.to(where).index_select(0, torch.ones(2).to(where)),
    lambda where: _X.to(where).sort(5),
    lambda where: torch.ones(2).long().to(where) - True,
    lambda where: torch.ones(2).long().to(where).add_(1, alpha=True),
    lambda where: torch.hypot(*torch.ones(2, 2).long().to(where)),
    lambda where: torch.ones(2).to(where).heaviside(torch.ones(2).long().to(where)),
    lambda where: torch.dot(*torch.ones(2, 2, dtype=torch.bool).to(where)),
    lambda where: _X.to(where).ldexp((_X > 0).to(where)),
    lambda where: torch.nn.functional.silu(torch.ones(2).long().to(where), inplace=True),
    lambda where: torch.nn.functional.glu(torch.ones(2).long().to(where)),
    lambda where: torch.nn.functional.smooth_l1_loss(*torch.ones(2, 2).long().to(where)),
    lambda where: torch.nn.functional.layer_norm(
        _X.to(where), (4,), torch.ones(4).double().to(where)
    ),
    lambda where: torch.nn.functional.dropout(torch.ones(2).long().to(where)),
]
# Their shapes and dtypes tell nothing to PyTorch's fake kernels: the host must be allowed to ask.
_UNFIT_FOR_THE_CPU: list[Callable[[str], object]] = [
    lambda where: torch.ones(2).long().to(where).mul_(torch.ones(2).to(where)),
    lambda where: _X.to(where) & _X.to(where),
    lambda where: _X.to(where) & 1,
    lambda where: _X.to(where) ^ True,
]


@pytest.mark.parametrize("fallback", ["host", "error"])
def test_of_a_call_that_pytorch_refuses_its_error_is_all_that_is_told(
    fallback: str, caplog: pytest.LogCaptureFixture, counts: Counter[str]
) -> None:
    torch.npu.reset_warnings()
    with caplog.at_level(logging.WARNING, logger="npu_iree"), torch.npu.fallback(fallback):
        for case, unfit in enumerate(_UNFIT + _UNFIT_FOR_THE_CPU * (fallback == "host")):
            assert _error_of(unfit, NPU) == _error_of(unfit, "cpu") != "", f"case {case}"
    assert (caplog.messages, counts["compiles"]) == ([], 0)


def test_what_only_changes_its_arguments_says_what_to_take_instead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = torch.nn.Parameter(torch.ones(3, device=NPU))
    x.grad = torch.ones(3, device=NPU)
    torch.npu.reset_warnings()
    with caplog.at_level(logging.WARNING, logger="npu_iree"):
        torch.optim.AdamW([x], fused=True).step()
        torch._amp_foreach_non_finite_check_and_unscale_(
            [x.grad], torch.zeros(1, device=NPU), torch.ones(1, device=NPU)
        )
    told = [r.getMessage() for r in caplog.records if r.name.startswith("npu_iree")]
    fused, scaler = told  # PyTorch's own traces are records, too
    assert "it changes its arguments" in fused
    assert "take foreach=True" in fused
    assert "bfloat16 needs no GradScaler" in scaler


def test_where_the_host_is_forbidden_it_changes_nothing() -> None:
    x, state = torch.ones(3, device=NPU), torch.get_rng_state()
    y = torch.zeros(3, device=NPU)
    with torch.npu.fallback("error"), npu_iree.copy_budget(d2h=0, waits=0):
        for refused in (
            lambda: x.lgamma_(),
            lambda: torch.lgamma(x, out=y),
            lambda: torch.multinomial(x, 1),
        ):
            with pytest.raises(npu_iree.UnsupportedOpError):
                refused()
    assert (x.tolist(), y.tolist()) == ([1, 1, 1], [0, 0, 0])
    assert torch.equal(torch.get_rng_state(), state)


def test_out_of_memory_says_who_holds_it_and_takes_nothing() -> None:
    count = 1 << 18  # more than what tests before this one have left, by an op of its own
    held = torch.cosh(torch.zeros(count, device=NPU))
    gc.collect()  # else what other tests have left makes room
    before = torch.npu.memory_allocated()
    torch.npu.set_memory_limit(before + 1000)
    for ask in (
        lambda: torch.zeros(10000, device=NPU),
        lambda: torch.ones(10000).to(NPU),
        lambda: held.expand(10, count).contiguous(),
        lambda: torch.outer(held, held),
    ):
        holds = rf"{4 * count} bytes in +1 handles made by aten.cosh.default"
        with pytest.raises(torch.OutOfMemoryError, match=holds):
            ask()
    torch.npu.set_memory_limit(None)
    assert held.sum().item() == count
    assert torch.npu.memory_allocated() <= before + 100


def test_a_tensor_that_finds_no_memory_to_grow_stays_as_it_was() -> None:
    x = torch.ones(4, device=NPU) * 3
    gc.collect()  # else what other tests have left makes room
    torch.npu.set_memory_limit(torch.npu.memory_allocated() + 100)
    torch.npu.ipc_collect()
    with pytest.raises(torch.npu.OutOfMemoryError):
        x.resize_(10000)
    torch.npu.set_memory_limit(None)
    assert x.tolist() == [3, 3, 3, 3]


def test_what_is_cast_or_gathered_is_counted() -> None:
    x = torch.randn(256, 256, device=NPU)
    moves = (lambda: x.to(torch.float16), lambda: x.t().contiguous())
    for move, nbytes in zip(moves, (2 << 16, 4 << 16), strict=True):
        move()  # compiles, and keeps an index
        gc.collect()
        before = torch.npu.memory_allocated()
        kept = [move() for _ in range(3)]
        assert torch.npu.memory_allocated() - before == 3 * nbytes
        del kept


def test_memory_is_freed_with_the_last_handle() -> None:
    torch.ones(1 << 16, device=NPU) * 2
    torch.npu.synchronize()  # what other tests' calls have found is held until somebody waits
    gc.collect()  # compiling leaves cycles behind
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    a = torch.ones(1 << 16, device=NPU) * 2
    b = a.view(-1)[5:]
    del a
    assert torch.npu.memory_allocated() - before == 4 << 16
    del b
    torch.npu.synchronize()
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() >= before + (4 << 16)


def test_a_clone_of_a_part_does_not_hold_the_rest() -> None:
    whole = torch.ones(1 << 16, device=NPU) * 2
    part = whole[:4].clone()
    gc.collect()
    torch.npu.synchronize()
    before = torch.npu.memory_allocated()
    del whole
    assert before - torch.npu.memory_allocated() == 4 << 16
    assert part.tolist() == [2] * 4


def test_a_failed_kernel_names_op_and_line_wherever_it_is_noticed(device: Device) -> None:
    a = torch.ones(3, device=NPU)
    model = torch.compile(torch.nn.Linear(3, 3).to(NPU), backend="npu_iree")
    model(a)
    with device.hold() as gate:
        b = a + 1  # the line that is named
        c = b * 2
        d = a * 3
        gate.fail("the device was lost")
    for look in (
        lambda: b.cpu(),
        lambda: c.cpu(),
        lambda: str(c),
        lambda: (c - 1).cpu(),
        lambda: c[1:].sum().item(),
        lambda: model(c).cpu(),
        lambda: c.median(),
        lambda: torch.npu.synchronize() or c[0].item(),
    ):
        with pytest.raises(npu_iree.DeviceError, match="the device was lost") as caught:
            look()
        assert caught.value.region == "aten.add.Tensor"
        assert f"{__file__}:" in caught.value.ops[0]
    with pytest.raises(npu_iree.DeviceError):
        d.cpu()
    c.zero_()
    assert c.tolist() == [0, 0, 0]
    assert (torch.ones(3, device=NPU) * 3 + 1).tolist() == [4, 4, 4], (
        "numbers are kept, not failures"
    )


def test_a_forked_child_is_told_and_the_parent_goes_on() -> None:
    a = torch.ones(3, device=NPU)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            told = str((a + 1).cpu())
        except npu_iree.NpuIreeError as error:
            told = str(error)
        os.write(write, told.encode())
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(read, 1000).decode()
    assert "opened before this process was forked" in told
    assert "a DataLoader whose workers read tensors takes those of the CPU" in told


def test_a_call_that_eager_refuses_does_not_send_the_op_to_the_host() -> None:
    a, b = torch.ones(4, 5, device=NPU), torch.ones(6, 7, device=NPU)
    with pytest.raises(RuntimeError):
        a @ b
    with npu_iree.copy_budget(waits=0, d2h=0):
        c = a @ a.t()
    assert c.tolist() == [[5] * 4] * 4


def test_an_index_out_of_range_is_told_where_one_waits() -> None:
    table = torch.arange(12.0, device=NPU).view(4, 3)
    bad = torch.tensor([1, 4], device=NPU)
    with npu_iree.copy_budget(d2h=0, waits=0):
        rows = torch.nn.functional.embedding(bad, table) * 2
        total = rows.sum() + 1
    for look in (lambda: rows.cpu(), lambda: total.item(), lambda: str(rows)):
        with pytest.raises(IndexError, match=r"out of range in dimension 0 .*embedding") as found:
            look()
        assert " in test_an_index_out_of_range_is_told_where_one_waits" in str(found.value)
    assert torch.nn.functional.embedding(bad - 1, table)[1].tolist() == [9, 10, 11]


def test_padded_batches_have_no_nested_form_on_the_device() -> None:
    """`nn.TransformerEncoder` asks for one where it is not trained."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1).eval()
    x, is_padding = torch.randn(2, 4, 8), torch.tensor([[False] * 3 + [True], [False] * 4])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=is_padding)
        found = model.to("npu")(x.to("npu"), src_key_padding_mask=is_padding.to("npu")).cpu()
    torch.testing.assert_close(found[~is_padding], expected[~is_padding], rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="the device has no nested tensors"):
        torch._nested_tensor_from_mask(x.to("npu"), ~is_padding.to("npu"))


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_quantized_tensors_are_refused_in_words() -> None:
    with pytest.raises(NotImplementedError, match="npu has no quantized tensors"):
        torch.quantize_per_tensor(torch.ones(4, device=NPU), 0.1, 0, torch.quint8)
    with pytest.raises(NotImplementedError, match="npu has no quantized tensors"):
        torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8).to(NPU)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_nested_tensors_that_are_not_jagged_are_refused_in_words() -> None:
    parts = [torch.ones(2), torch.ones(3)]
    with pytest.raises(NotImplementedError, match=r"take layout=torch\.jagged"):
        torch.nested.nested_tensor(parts).to(NPU)
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged).to(NPU)
    assert [part.tolist() for part in jagged.unbind()] == [[1] * 2, [1] * 3]

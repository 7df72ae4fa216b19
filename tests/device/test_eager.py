"""Eager ops: one kernel for all sizes, numbers that are no constants, a host that is told of."""

from __future__ import annotations

import copy
import gc
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import npu_iree
from npu_iree.device import Device
from npu_iree.torch_device import kernels, ops
from npu_iree.torch_device.kept import Kept
from tolerances import assert_same

NPU = "npu"
ADD_TWENTY = """
import sys, torch, npu_iree
from torch._dynamo.utils import counters
npu_iree.register_device()
for i in range(20):
    shape = (2 + i, 40 - i)
    x, y = torch.randn(shape), torch.randn(shape)
    assert torch.equal((x.npu() + y.npu()).cpu(), x + y)
print(counters["npu_iree"]["compiles"])
"""


def test_adding_twenty_shapes_compiles_one_kernel_and_a_second_process_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: Counter[str]
) -> None:
    monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path))
    monkeypatch.setattr(kernels, "_FAMILIES", Kept(9))  # whatever tests before have compiled
    add = ops.EagerOp(torch.ops.aten.add.Tensor)
    for i in range(20):
        x, y = torch.randn(2 + i, 40 - i), torch.randn(2 + i, 40 - i)
        assert torch.equal(add(x.npu(), y.npu()).cpu(), x + y)
    assert counts["compiles"] == 1
    done = subprocess.run([sys.executable, "-c", ADD_TWENTY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0"


def test_square_shapes_and_other_sizes_share_the_kernel(counts: Counter[str]) -> None:
    for shape in ((7, 5), (6, 6), (2, 9)):
        x = torch.randn(shape)
        assert_same((x.npu() * x.npu()).cpu(), x * x)
        first = counts["compiles"]
    x = torch.randn(9, 9)
    assert_same((x.npu() * x.npu()).cpu(), x * x)
    assert counts["compiles"] == first


def test_other_numbers_are_no_other_kernels(counts: Counter[str]) -> None:
    x = torch.randn(3, 4)
    a = x.to(NPU)

    def several(t: torch.Tensor, v: float) -> list[torch.Tensor]:
        return [
            t + v,
            t.clamp(-v, v),
            torch.addcdiv(t, t, t + 9, value=v),
            torch.sub(t, t, alpha=v),
            torch.full_like(t, v),
            t > v,
            t.masked_fill(t > 0, v),
            t.index_fill(0, torch.tensor([0, -1], device=t.device), v),
            F.leaky_relu(t, v),
        ]

    several(a, 0.5)
    before = counts["compiles"]
    for v in (0.25, 3.0, float("inf"), -0.0):
        for one, other in zip(several(a, v), several(x, v), strict=True):
            assert_same(one.cpu(), other)
    assert counts["compiles"] == before


def test_powers_but_products_and_square_roots_are_one_kernel(counts: Counter[str]) -> None:
    x = torch.rand(3, 4)
    compiled = []
    for exponent in (1.5, 1.7, -0.3, 2.0):
        assert_same((x.npu() ** exponent).cpu(), x**exponent)
        compiled.append(counts["compiles"])
    assert compiled[0] == compiled[2] < compiled[3]


def test_a_truth_beside_truths_is_no_constant_and_no_op_for_the_host(counts: Counter[str]) -> None:
    x = torch.tensor([True, False])
    with torch.npu.fallback("error"):
        for value in (True, False):
            assert_same((value ^ x.to(NPU)).cpu(), value ^ x)
    assert counts["compiles"] <= 1


PROMOTED = [(torch.uint8, 1.5), (torch.float16, 2)]
OTHERS = [
    *((torch.uint8, 2), (torch.uint8, True), (torch.float16, 1.5), (torch.float16, True)),
    *((d, value) for d in (torch.float32, torch.int64) for value in (2, 1.5, True)),
]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [*PROMOTED, *(pytest.param(*case, marks=pytest.mark.sweep) for case in OTHERS)],
)
def test_numbers_promote_as_on_the_cpu(dtype: torch.dtype, value: float) -> None:
    for x in (torch.ones(3, dtype=dtype), torch.tensor(3, dtype=dtype)):
        a = x.to(NPU)
        for op in (torch.add, torch.mul, torch.div, torch.eq):
            assert_same(op(a, value).cpu(), op(x, value))


def test_numbers_keep_their_digits_beside_a_scalar_of_bf16() -> None:
    for n in range(1, 30, 4):
        x = torch.tensor(float(n), dtype=torch.bfloat16)
        assert torch.equal((x.to(NPU) * 0.1).cpu(), x * 0.1)


def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.layer_norm(F.gelu(x @ w), [w.shape[1]])
    return torch.softmax(y, -1).cumsum(-1).amax(-1).mean() * y.std()


def test_gradients_are_those_of_the_cpu() -> None:
    x, w = torch.randn(5, 4), torch.randn(4, 8)
    found = []
    for where in ("cpu", "npu"):
        leaves = [t.to(where).requires_grad_() for t in (x.clone(), w.clone())]
        forward(*leaves).backward()
        found.append([t.grad.cpu() for t in leaves])  # type: ignore[union-attr]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("training", "dtype"),
    [
        (True, torch.float32),
        (False, torch.float32),
        (True, torch.bfloat16),
        pytest.param(True, torch.float16, marks=pytest.mark.sweep),
        pytest.param(False, torch.bfloat16, marks=pytest.mark.sweep),
    ],
)
def test_batch_norm_writes_its_running_statistics_whatever_its_momentum(
    training: bool, dtype: torch.dtype, counts: Counter[str]
) -> None:
    found = []
    torch.npu.set_fallback("error")
    for where in ("cpu", "npu"):
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm2d(3).train(training).to(where)
        x = torch.randn(4, 3, 5, 5).to(where, dtype).requires_grad_()
        norm(x).square().mean().backward()
        before = counts["compiles"]
        norm.momentum = None  # type: ignore[assignment]
        norm(x)
        assert counts["compiles"] == before
        found.append([t.cpu() for t in (norm.running_mean, norm.running_var, x.grad)])  # type: ignore[union-attr]
    for one, other in zip(*found, strict=True):
        rtol = 1e-4 if one.dtype is torch.float32 else torch.finfo(one.dtype).eps
        torch.testing.assert_close(other, one, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(
    "norm",
    [
        torch.nn.LayerNorm(6),
        pytest.param(torch.nn.InstanceNorm1d(4, affine=True), marks=pytest.mark.sweep),
        pytest.param(torch.nn.GroupNorm(2, 4), marks=pytest.mark.sweep),
    ],
)
def test_norms_of_halves_beside_weights_of_floats_give_halves(norm: torch.nn.Module) -> None:
    x = torch.randn(2, 4, 6).bfloat16()
    with torch.npu.fallback("error"):
        assert_same(copy.deepcopy(norm).to(NPU)(x.npu()).detach().cpu(), norm(x).detach())


def test_zeros_that_forward_mode_asks_for_have_memory() -> None:
    """As those of `torch.func.hessian` of a product."""
    zeros = torch._efficientzerotensor([1, 3], device=NPU)
    assert (zeros + 1).tolist() == [[1, 1, 1]]


def test_results_have_eagers_strides() -> None:
    x = torch.randn(3, 4, 5)
    a = x.to(NPU)
    for function in _STRIDED:
        found, expected = function(a), function(x)
        assert found.stride() == expected.stride()
        assert_same(found.cpu(), expected)


_STRIDED: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t.transpose(0, 2) + 1,
    lambda t: t.permute(1, 2, 0).exp(),
    lambda t: t[:, 1:3] * 2,
    lambda t: t.unsqueeze(0).contiguous(memory_format=torch.channels_last) * 2,
    lambda t: t.transpose(1, 2) @ t,
    lambda t: t.transpose(0, 2)[:, ::2] + 1,
    lambda t: t.unsqueeze(0).contiguous(memory_format=torch.channels_last)[:, :, ::2] * 2,
    lambda t: F.group_norm(t.unsqueeze(0).contiguous(memory_format=torch.channels_last), 3),
    lambda t: torch.add(t.mT, 1, out=t.new_empty(0)),
]


def test_out_arguments_are_written_and_resized() -> None:
    x = torch.randn(3, 4)
    out = torch.empty(0, device=NPU)
    same = torch.add(x.to(NPU), 1, out=out)
    assert same is out
    assert_same(out.cpu(), x + 1)
    wide = torch.zeros(3, 4, dtype=torch.float64, device=NPU)
    torch.mul(x.to(NPU), 2, out=wide)
    assert_same(wide.cpu(), (x * 2).double())


def test_an_op_of_a_library_is_not_the_one_of_that_name_in_pytorch() -> None:
    with torch.library._scoped_library("npu_iree_tests", "FRAGMENT") as library:
        library.define("mul_(Tensor(a!) self, Tensor other) -> Tensor(a!)")
        library.impl("mul_", lambda x, other: x.copy_(x * other + 1), "CPU")
        x = torch.full((3,), 2.0, device=NPU)
        torch.ops.npu_iree_tests.mul_(x, x.clone())
        assert x.tolist() == [5] * 3


def test_outs_of_other_dtypes_are_other_kernels() -> None:
    x = torch.randn(20)
    a = x.to(NPU)
    assert_same(torch.logical_not(a).cpu(), torch.logical_not(x))
    assert_same(a.logical_not_().cpu(), x.logical_not_())


def test_what_has_no_kernel_runs_on_the_host_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = torch.randn(7)
    torch.npu.reset_warnings()
    with caplog.at_level(logging.WARNING, logger="npu_iree"):
        for _ in range(2):
            assert_same(x.to(NPU).median().cpu(), x.median())
    told = [m for m in caplog.messages if "aten.median.default runs on the host: torch-mlir" in m]
    assert len(told) == 1
    assert __file__ in told[0]


def test_the_host_can_be_forbidden() -> None:
    a = torch.randn(7).to(NPU)
    z = torch.ones(4, dtype=torch.complex64).to(NPU)
    with torch.npu.fallback("error"):
        with pytest.raises(npu_iree.UnsupportedOpError, match=r"aten\.median"):
            a.median()
        for copy in (lambda: a.to(torch.float8_e4m3fn), lambda: z.conj().resolve_conj()):
            with pytest.raises(npu_iree.UnsupportedOpError, match=r"aten\.copy_"):
                copy()
        a.add(1)
        torch.randn(3, device=NPU)  # draws, as every device's do: nothing is read
    a.median()
    with pytest.raises(npu_iree.OptionError, match="'host' or 'error'"):
        torch.npu.set_fallback("never")


def test_the_spread_of_nothing_is_no_number() -> None:
    """One kernel serves all sizes, and none is divided by less than nothing."""
    x = torch.rand(3, 4)
    for size in (3, 1, 0):
        for correction in (0, 1, 2):
            expected = (
                x[:size].var(correction=correction),
                x[:size, :1].var(0, correction=correction),
            )
            a = x.to(NPU)[:size]
            given = a.var(correction=correction), a[:, :1].var(0, correction=correction)
            assert_same([v.cpu() for v in given], list(expected))


def test_a_huber_loss_is_of_the_dtype_of_its_first_argument() -> None:
    x, target = torch.randn(5), torch.randn(5, dtype=torch.float64)
    assert_same(F.huber_loss(x.to(NPU), target.to(NPU)).cpu(), F.huber_loss(x, target))


def test_host_ops_take_numbers_in_the_place_of_tensors() -> None:
    found = []
    for where in ("cpu", NPU):
        x = torch.tensor([1.5, -2.0], device=where)
        found.append([torch.copysign(x, -1), torch.special.zeta(2.0, x), x.remainder_(True)])
    assert_same([t.cpu() for t in found[1]], found[0])


def test_host_ops_write_to_what_they_are_given() -> None:
    for where in ("cpu", "npu"):
        values, indices = torch.empty(2, device=where), torch.empty(2, device=where).long()
        x = torch.tensor([[3.0, 1.0, 2.0], [9.0, 8.0, 7.0]], device=where)
        torch.median(x, 1, out=(values, indices))
        assert values.tolist() == [2, 8]
        assert indices.tolist() == [2, 1]


def test_host_ops_know_nothing_of_the_autocast_of_the_cpu() -> None:
    a = torch.randn(5, 4).to(NPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.linalg.pinv(a).dtype is torch.float32


def test_host_ops_may_write_to_what_they_read() -> None:
    x = torch.rand(4) + 1
    a = x.to(NPU)
    assert_same(a.lgamma_().cpu(), x.lgamma())
    row = a.view(2, 2)[1]
    torch.digamma(row, out=row)
    y = x.lgamma()
    torch.digamma(y[2:], out=y[2:])
    assert_same(a.cpu(), y)


def test_a_call_that_is_made_for_the_first_time_keeps_nothing() -> None:
    torch.ones(1236, device=NPU)
    gc.collect()
    gc.disable()
    try:
        held = torch.npu.memory_allocated()
        torch.ones(1237, device=NPU)
        assert torch.npu.memory_allocated() == held
    finally:
        gc.enable()


def test_nothing_waits_before_somebody_looks(device: Device) -> None:
    a = torch.randn(4, 4, device=NPU)
    with device.hold() as gate, npu_iree.copy_budget(waits=0, d2h=0):
        b = F.layer_norm(a @ a + 1, [4])
        b[0] = b[1]
        c = torch.cat([b, a.t()])[:, 1:].contiguous()
        c.add_(c.sum())
        assert [p.is_reached() for p in device.in_flight].count(True) == 0
        gate.open()
    x = a.cpu()
    y = F.layer_norm(x @ x + 1, [4])
    y[0] = y[1]
    z = torch.cat([y, x.t()])[:, 1:].contiguous()
    torch.testing.assert_close(c.cpu(), z + z.sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "look",
    [torch.Tensor.item, bool, str, torch.Tensor.cpu, torch.Tensor.tolist, torch.median],
)
def test_looking_is_in_the_ledger_with_the_users_line(
    look: Callable[[torch.Tensor], object],
) -> None:
    a = torch.ones((), device=NPU) * 2
    with npu_iree.record_transfers() as ledger:
        look(a)
    assert ledger.waits
    assert all(e.where.startswith(f"{__file__}:") for e in ledger.waits)
    with npu_iree.copy_budget(waits=0), pytest.raises(npu_iree.HostCopyError):
        look(a)


def test_a_backward_is_watched_too() -> None:
    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * grad.sum().item()

    x = torch.ones(3, device=NPU, requires_grad=True)
    y = Look.apply(x).sum()
    with npu_iree.record_transfers() as ledger:
        y.backward()
    assert len(ledger.waits) == 1


def test_calls_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_KEPT_CALLS", 4)
    relu = ops.EagerOp(torch.ops.aten.relu.default)
    for _ in range(2):
        for size in range(2, 10):
            assert relu(torch.full((size,), -1.0, device=NPU)).tolist() == [0] * size
    assert len(relu._calls) == 4

"""Tensors on "npu" are tensors: made, moved, viewed, written in place, printed, saved."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import npu_iree
from npu_iree.torch_device import put
from npu_iree.torch_device.storage import shaped
from tolerances import assert_same

NPU = "npu"


def test_registering_again_is_fine_and_another_target_is_not() -> None:
    assert npu_iree.register_device() == torch.device(NPU)
    with pytest.raises(npu_iree.NpuIreeError, match="npu-local, and stays so"):
        npu_iree.register_device("npu-virtual")


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2),
        *(torch.int64, torch.uint8, torch.bool),
        *(torch.complex32, torch.complex64, torch.complex128),
    ],
)
def test_a_round_trip_gives_the_same_bytes(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5).to(dtype)
    back = x.to(NPU).cpu()
    assert back.dtype is dtype
    assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize(
    "source",
    [
        *(torch.float32, torch.int8),
        *(pytest.param(d, marks=pytest.mark.sweep) for d in (torch.bool, torch.int64, torch.half)),
    ],
)
def test_conversions_are_those_of_the_cpu(source: torch.dtype) -> None:
    value = torch.tensor([0.0, 1.5, -2.5, 100.0]).to(source)
    for target in (torch.bool, torch.int32, torch.float32, torch.bfloat16, torch.complex64):
        assert_same(value.to(NPU).to(target).cpu(), value.to(target))


_NOT_COMPUTED_WITH = (
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
)


@pytest.mark.parametrize("dtype", _NOT_COMPUTED_WITH, ids=str)
def test_what_the_device_only_keeps_is_converted_as_on_the_cpu(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 64.0]]).to(dtype)
    a = x.to(NPU)
    for layout in (lambda x: x, lambda x: x[:, ::2], lambda x: x.t()[1:]):
        for target in (torch.float32, torch.int64):
            assert_same(layout(a).to(target).cpu(), layout(x).to(target))
    assert_same(torch.zeros(2, 3, device=NPU).copy_(a).cpu(), torch.zeros(2, 3).copy_(x))
    a[:, ::2] = torch.tensor([32.0, 2.0], device=NPU)
    assert a.float().tolist() == [[32, 2, 2], [32, 16, 2]]
    with torch.npu.fallback("error"), pytest.raises(npu_iree.UnsupportedOpError, match=str(dtype)):
        a.float()


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[:, 1:3],
        lambda x: x[1],
        lambda x: x[::2, ::2],
        lambda x: x[1:1],
        lambda x: x[0, 0],
        lambda x: x.unsqueeze(1).expand(4, 3, 6),
        lambda x: x.unfold(1, 3, 1),
    ],
)
def test_views_read_what_the_cpu_reads(layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.arange(24.0).view(4, 6)
    a = x.to(NPU)
    assert_same(layout(a).cpu(), layout(x).clone())
    assert_same(layout(a).contiguous().cpu(), layout(x).contiguous())
    assert_same((layout(a) + 1).cpu(), layout(x) + 1)
    assert_same(layout(x).to(NPU).cpu(), layout(x).clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float16, torch.complex128])
def test_writing_to_a_view_is_seen_by_all_that_share_its_memory(dtype: torch.dtype) -> None:
    x = torch.randn(4, 6).to(dtype)
    a = x.to(NPU)
    for t in (x, a):
        t[1] = t[2]
        t[:, 1:3] = t[:, 3:5]
        t.t()[5] = 0
        t.view(-1)[::7].copy_(torch.ones(4))
    assert torch.equal(a.cpu(), x)


def test_writing_through_wider_numbers_keeps_the_end_of_a_storage_that_they_do_not_fill() -> None:
    written = []
    for device in ("cpu", NPU):
        x = torch.arange(7.0, device=device)
        x[:2].view(torch.float64).fill_(1)
        x[:6].view(torch.float64)[::2].copy_(torch.tensor([2.0, 3.0], device=device))
        torch.view_as_complex(x[2:6].view(2, 2)).mul_(2)
        written.append(x.tolist())
    assert written[1] == written[0]


def test_in_place_ops_keep_the_storage_and_reach_every_view() -> None:
    a = torch.ones(3, 4, device=NPU)
    row, flat, storage = a[1], a.view(-1), a.untyped_storage()
    row.mul_(3)
    flat[:2].add_(1)
    a.sub_(0.5)
    assert a.untyped_storage() is storage
    assert row.tolist() == [2.5] * 4
    assert flat[:5].tolist() == [1.5, 1.5, 0.5, 0.5, 2.5]


def test_a_geometry_that_changes_in_place_moves_no_bytes() -> None:
    torch.npu.set_fallback("error")
    seen = []
    for device in ("cpu", NPU):
        x = torch.arange(12.0).to(device)
        y, geometries = x.detach(), []
        x.unsqueeze_(0).squeeze_(0)
        for change in (
            lambda x: x.as_strided_((3, 2), (1, 4), 2),
            lambda x: x.t_(),
            lambda x: x.transpose_(0, 1),
        ):
            change(x)
            geometries.append((x.shape, x.stride(), x.storage_offset()))
        x += 100
        seen.append((geometries, x.tolist(), y.tolist()))
    assert seen[0] == seen[1]


def test_a_tensor_set_to_nothing_is_empty_and_lets_go_of_its_memory() -> None:
    x = torch.ones(3, device=NPU)
    y = x.detach()
    assert x.set_().shape == (0,)
    assert (x.device.type, x.dtype, y.tolist()) == (NPU, torch.float32, [1, 1, 1])


def test_numbers_are_stored_with_all_their_digits() -> None:
    for device in ("cpu", NPU):
        x = torch.zeros(2, dtype=torch.int64, device=device)
        assert x.fill_(1e9 + 7).tolist() == [1000000007] * 2
        assert torch.full((1,), 16777217.0, dtype=torch.int64, device=device).item() == 16777217
        assert torch.full((1,), 0.1, dtype=torch.float64, device=device).item() == 0.1
        assert (torch.tensor(5, dtype=torch.int8, device=device) + 200).item() == -51
        for number, dtype, stored in (
            (0.1, torch.float64, 0.1),
            (True, torch.float32, 1.0),
            (300, torch.int8, 44),
            (0.1j, torch.complex128, 0.1j),
        ):
            assert torch.empty(2, dtype=dtype, device=device).copy_(number).tolist() == [stored] * 2


def test_the_beginning_of_a_tensor_is_fetched_from_memory_of_its_own() -> None:
    whole = npu_iree.open_device("npu-virtual").put(torch.arange(8.0))
    assert shaped(whole, (4,), torch.float32).to_host().tolist() == [0, 1, 2, 3]


def test_a_clone_and_its_source_do_not_share_later_writes() -> None:
    a = torch.zeros(3, device=NPU)
    b, c = a.clone(), a.detach()
    b.add_(1)
    assert a.tolist() == [0, 0, 0]
    a.add_(2)
    assert b.tolist() == [1, 1, 1]
    assert c.tolist() == [2, 2, 2]


def test_what_is_done_to_the_cpu_tensor_later_does_not_reach_the_device() -> None:
    x = torch.zeros(1 << 10)
    a = x.to(NPU, non_blocking=True)
    y = a.to("cpu", non_blocking=True)
    x.fill_(7)
    y.fill_(9)
    assert a.cpu().unique().tolist() == [0]


def test_printing_shows_numbers_and_device() -> None:
    a = torch.tensor([[1.5, 2.0], [3.0, 4.0]], device=NPU)
    assert str(a) == "tensor([[1.5000, 2.0000],\n        [3.0000, 4.0000]], device='npu:0')"
    assert f"{a[0, 0]:.1f}" == "1.5"
    assert "Parameter" in str(torch.nn.Parameter(a))


def test_indexing_like_on_the_cpu() -> None:
    x = torch.randn(4, 6)
    a = x.to(NPU)
    rows = torch.tensor([3, 0])
    assert torch.equal(a[rows].cpu(), x[rows])
    assert torch.equal(a[rows.to(NPU), 1:].cpu(), x[rows, 1:])
    assert torch.equal(a[a > 0].cpu(), x[x > 0])
    assert torch.equal(a[None, ..., -1].cpu(), x[None, ..., -1])
    for t in (x, a):
        t[t > 0] = 0
        t[rows.to(t.device)] += 1
    assert torch.equal(a.cpu(), x)


def test_saved_and_loaded_with_shared_memory_and_any_map_location() -> None:
    a = torch.randn(3, 4).to(NPU)
    file = io.BytesIO()
    torch.save({"whole": a, "row": a[1]}, file)

    def load(where: str | None) -> dict[str, torch.Tensor]:
        file.seek(0)
        loaded: dict[str, torch.Tensor] = torch.load(file, map_location=where)
        return loaded

    back = load(None)
    assert back["whole"].device.type == "npu"
    back["row"].zero_()
    assert back["whole"][1].tolist() == [0] * 4
    assert torch.equal(load("cpu")["whole"], a.cpu())
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    assert load("npu").device.type == "npu"  # type: ignore[attr-defined]


def test_copied_and_pickled() -> None:
    model = torch.nn.Linear(4, 2).to(NPU)
    twin = copy.deepcopy(model)
    model.weight.data.zero_()
    assert twin.weight.device.type == "npu"
    assert twin.weight.abs().sum().item() > 0
    a = torch.randn(3).to(NPU)
    assert torch.equal(pickle.loads(pickle.dumps(a)).cpu(), a.cpu())


def test_sent_to_a_process_as_copies() -> None:
    layer = torch.nn.Linear(3, 2, device=NPU)
    sent = layer.weight, layer.bias.detach()[1:], torch.ones(2)
    back = ForkingPickler.loads(ForkingPickler.dumps(sent))
    assert [type(t) for t in back] == [torch.nn.Parameter, torch.Tensor, torch.Tensor]
    assert [(t.device.type, t.requires_grad) for t in back] == [
        (NPU, True),
        (NPU, False),
        ("cpu", False),
    ]
    assert_same([t.detach().cpu() for t in back], [t.detach().cpu() for t in sent])
    with pytest.raises(RuntimeError, match="non-leaf tensor"):
        ForkingPickler.dumps(layer.weight * 2)
    with pytest.raises(RuntimeError, match=r"is of one process: share that of \.cpu\(\)"):
        layer.share_memory()


def test_dlpack_hands_out_a_copy_that_may_be_written_to() -> None:
    a = torch.ones(3, device=NPU)
    array = np.from_dlpack(a)
    torch.from_dlpack(a).fill_(5)
    assert torch.from_dlpack(torch.to_dlpack(a)).tolist() == [1, 1, 1]
    with pytest.raises(BufferError, match="DLPack gets a copy"):
        torch.from_dlpack(a, copy=False)
    assert array.tolist() == [1, 1, 1]
    assert a.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.usefixtures("deterministic")
def test_in_deterministic_mode_memory_that_nobody_set_is_filled(dtype: torch.dtype) -> None:
    for made in (
        torch.empty(3, 4, dtype=dtype, device=NPU),
        torch.empty_strided((3, 4), (1, 3), dtype=dtype, device=NPU),
        torch.zeros(3, 4, dtype=dtype, device=NPU).new_empty(5),
        torch.zeros(2, dtype=dtype, device=NPU).resize_(5)[2:],
    ):
        want = torch.empty(made.shape, dtype=dtype)
        assert_same(made.cpu(), want)
        assert not want.isfinite().any() or want.all()


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_random_numbers_are_those_of_the_cpu() -> None:
    drawn = {}
    for where in ("cpu", "npu"):
        torch.manual_seed(5)
        x = torch.randn(3, device=where)
        y = torch.empty(4, device=where).uniform_(1, 2)
        z = torch.nn.functional.dropout(torch.ones(50, device=where), 0.3)
        torch.native_dropout(x, 0.0, True)  # draws, too
        p = torch.randperm(6, device=where)
        drawn[where] = [t.cpu() for t in (x, y, z, p)]
    for one, other in zip(drawn["cpu"], drawn["npu"], strict=True):
        torch.testing.assert_close(other, one)


LAYOUTS: dict[str, Callable[[str], torch.Tensor]] = {
    "channels last": lambda where: torch.ones(2, 3, 4, 4, device=where).to(
        memory_format=torch.channels_last
    ),
    "transposed": lambda where: torch.ones(20, 5, device=where).t(),
    "with gaps": lambda where: torch.ones(6, 8, device=where)[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_numbers_are_drawn_in_the_order_of_memory(layout: str) -> None:
    drawn = {}
    for where in ("cpu", "npu"):
        torch.manual_seed(5)
        fills = [LAYOUTS[layout](where).uniform_(), LAYOUTS[layout](where).normal_()]
        dropped = torch.nn.functional.dropout(LAYOUTS[layout](where), 0.3)
        drawn[where] = [t.cpu() for t in (*fills, dropped)]
    for one, other in zip(drawn["cpu"], drawn["npu"], strict=True):
        torch.testing.assert_close(other, one)


def test_generator_state_is_saved_and_restored() -> None:
    state = torch.npu.get_rng_state()
    with torch.random.fork_rng(device_type="npu"):
        first = torch.randn(3, device=NPU).cpu()
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.randn(3, device=NPU).cpu(), first)


def test_autocast_computes_products_in_bf16_and_sums_in_f32() -> None:
    a = torch.randn(4, 4, device=NPU)
    with torch.autocast("npu", dtype=torch.bfloat16):
        product = a @ a
        assert product.dtype is torch.bfloat16
        assert torch.softmax(product, -1).dtype is torch.float32
        assert (product + 1).dtype is torch.bfloat16
        for op in IN_FULL:
            assert op(product).dtype is torch.float32
        with pytest.raises(RuntimeError, match="take binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(product, a)
    assert (a @ a).dtype is torch.float32


IN_FULL: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: F.rms_norm(x, (4,)),
    lambda x: torch.linalg.vector_norm(x),
    lambda x: torch.prod(x, 0),
    lambda x: torch.pow(2.0, x),
]


def test_autocast_gives_what_takes_one_dtype_the_widest() -> None:
    a, index = torch.randn(4, 8, device=NPU), torch.zeros(4, 8, dtype=torch.int64, device=NPU)
    with torch.autocast("npu", dtype=torch.bfloat16):
        half = a @ a.t() @ a
        assert half.dtype is torch.bfloat16
        assert torch.dot(half[0], half[1]).dtype is torch.bfloat16
        assert torch.dot(half[0], a[0]).dtype is torch.float32
        summed = torch.zeros(4, 8, device=NPU).scatter_add(0, index, half)
        assert summed.dtype is torch.float32


def test_the_accelerator_of_this_process_is_npu() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(NPU)
    assert torch.accelerator.device_count() == torch.npu.device_count() == 1
    torch.accelerator.synchronize()
    with torch.npu.Stream() as stream:
        assert torch.accelerator.current_stream() is stream
        assert stream.device == torch.device(NPU, 0)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    held = torch.npu.memory_allocated()
    assert torch.accelerator.memory_stats()["allocated_bytes.all.peak"] == held
    assert torch.accelerator.max_memory_reserved() >= torch.accelerator.memory_reserved() >= held
    with pytest.raises(npu_iree.NpuIreeError, match="no limit of memory"):
        torch.accelerator.get_memory_info()
    torch.npu.set_memory_limit(held + 5)
    assert torch.accelerator.get_memory_info() == (5, held + 5)
    assert torch.empty(4, pin_memory=False).pin_memory().shape == (4,)
    with torch.npu.device_of(torch.empty(1)), torch.npu.device_of(torch.empty(1, device=NPU)):
        assert not torch.npu.can_device_access_peer(0, "npu:0")
        assert not torch.npu.is_current_stream_capturing()
    with torch.npu.device(0), pytest.raises(RuntimeError, match="npu:1 is no such"):
        torch.npu.synchronize("npu:1")
    with torch.accelerator.device_index(0):
        torch.accelerator.set_device_index(0)
    with pytest.raises(RuntimeError, match="1 is no such"), torch.accelerator.device_index(1):
        pass
    with pytest.raises(RuntimeError, match="1 is no such"):
        torch.accelerator.set_device_index(1)


@pytest.mark.parametrize("where", ["cpu", NPU])
def test_a_module_in_data_parallel_runs_where_it_is(where: str) -> None:
    x = torch.ones(2, 3, device=where)
    parallel = torch.nn.DataParallel(torch.nn.Linear(3, 2).to(where))
    assert {p.device for p in parallel.parameters()} == {x.device}
    assert torch.equal(parallel(x), parallel.module(x))


def test_lazy_conjugates_and_negatives_are_what_they_say() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    a = z.to(NPU)
    assert torch.equal(a.conj().cpu(), z.conj().resolve_conj())
    assert torch.equal((a.conj().imag * 2).cpu(), z.conj().imag * 2)
    b = torch.zeros_like(a)
    b.conj().copy_(a)
    assert torch.equal(b.cpu(), z.conj().resolve_conj())
    b.conj().copy_(z)
    assert torch.equal(b.cpu(), z.conj().resolve_conj())


def test_products_are_written_to_what_is_lazily_conjugated_or_negative() -> None:
    z, x, y = torch.randn(3, 2, 2, dtype=torch.complex64).unbind(0)
    for write in (
        lambda z, x, y: z.conj().addmm_(x, y),
        lambda z, x, y: z.conj()[None].baddbmm_(x[None], y[None]),
        lambda z, x, y: z.conj().imag.addmm_(x.real, y.real),
    ):
        a, b = z.to(NPU), z.clone()
        write(a, x.to(NPU), y.to(NPU))
        write(b, x, y)
        assert_same(a.cpu(), b)


def test_products_of_lazily_conjugated_matrices() -> None:
    z, w = torch.randn(2, 3, 4, dtype=torch.complex64).unbind(0)
    for product in (
        lambda z, w: z @ w.mH,
        lambda z, w: z.conj().mT @ w,
        lambda z, w: torch.bmm(z[None], w.mH[None]),
        lambda z, w: torch.addmm(z.mH @ z, z.mH, w),
    ):
        assert_same(product(z.to(NPU), w.to(NPU)).cpu(), product(z, w))
    gradients = []
    for where in ("cpu", NPU):
        a = z.clone().to(where).requires_grad_()
        torch.view_as_real(a @ w.mT.to(where)).square().sum().backward()
        assert a.grad is not None
        gradients.append(a.grad.cpu())
    assert_same(gradients[1], gradients[0])


def test_what_is_drawn_or_computed_on_the_host_is_not_copied_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[int] = []
    monkeypatch.setattr(put, "dense_copy", lambda t: copied.append(t.nbytes) or t.clone())
    a = torch.empty(1 << 12, device=NPU).normal_()
    order = torch.randperm(1 << 12, device=NPU)
    assert not copied
    assert a[order].sum().item() == pytest.approx(a.sum().item(), abs=1e-2)


def test_tensors_are_compared_behind_one_wait_and_only_if_their_shapes_agree() -> None:
    a = torch.arange(3.0, device=NPU)
    with npu_iree.record_transfers() as ledger:
        assert torch.equal(a, torch.arange(3, device=NPU))
        assert torch.equal(a, a)
        assert not torch.equal(a, a[:2])
        assert not torch.equal(a, -a)
    assert len(ledger.waits) == 3


def test_a_cache_that_is_emptied_holds_no_places_of_elements() -> None:
    a = torch.ones(64, 64, device=NPU)
    torch.npu.empty_cache()
    held = torch.npu.memory_allocated()
    assert a.t()[::2].sum().item() == 64 * 32
    torch.npu.empty_cache()
    assert torch.npu.memory_allocated() - held < a[::2].numel()


def test_storages_are_filled_and_saved_in_the_old_format() -> None:
    file, a = io.BytesIO(), torch.ones(3, device=NPU)
    torch.save(a, file, _use_new_zipfile_serialization=False)
    a.untyped_storage().fill_(0)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.device.type == NPU
    assert (a.tolist(), loaded.tolist()) == ([0] * 3, [1] * 3)


@pytest.mark.filterwarnings("ignore:Sparse .*:UserWarning")
def test_sparse_tensors_are_refused_in_words() -> None:
    net = torch.nn.Embedding(3, 2, sparse=True).to(NPU)
    for make in (
        lambda: net(torch.tensor([1], device=NPU)).sum().backward(),
        lambda: torch.eye(2).to_sparse().to(NPU),
        lambda: torch.eye(2).to_sparse_csr().to(NPU),
        lambda: torch.sparse_csc_tensor([0, 1], [0], [1.0], device=NPU),
    ):
        with pytest.raises(NotImplementedError, match="the device has no sparse tensors"):
            make()

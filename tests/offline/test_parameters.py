"""Parameters at load: replaced without a compile, and what is wrong with them is named."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import npu_iree
from lowering.errors import ExportError
from models.small import Net, SmallModel, Tied, compiled, seeded
from npu_iree.offline.build import BuildOptions
from npu_iree.offline.parameter_files import read_parameters
from tolerances import assert_same

Tensors = dict[str, torch.Tensor]
NAMES = ["first.bias", "first.weight", "scale", "second.bias", "second.weight"]


@pytest.fixture
def tuned() -> Net:
    """The model after some training."""
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.rand_like(parameter)
    return model


def by_save_file(state: Tensors, folder: Path) -> Path:
    save_file(state, folder / "tuned.safetensors")
    return folder / "tuned.safetensors"


def by_save_parameters(state: Tensors, folder: Path) -> Path:
    npu_iree.save_parameters(state, folder / "tuned.safetensors")
    return folder / "tuned.safetensors"


def by_irpa(state: Tensors, folder: Path) -> Path:
    npu_iree.save_parameters(state, folder / "tuned.irpa")
    return folder / "tuned.irpa"


def as_it_is(state: Tensors, folder: Path) -> Tensors:
    return state


WAYS = [by_save_file, by_save_parameters, by_irpa, as_it_is]


@torch.no_grad()
@pytest.mark.parametrize("write", WAYS)
def test_other_weights_are_bound_without_a_compile(
    write: Callable[[Tensors, Path], Path | Tensors],
    net: Path,
    tuned: Net,
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compile_(*args: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("lowering.pipeline.run_stage", compile_)
    params = write(tuned.state_dict(), tmp_path)
    x = seeded(3, 4)
    assert_same(npu_iree.load(net, target, params=params)(x), tuned(x))
    assert_same(npu_iree.load(net, target)(x), Net()(x))


@torch.no_grad()
def test_a_state_dict_is_copied(net: Path, tuned: Net) -> None:
    x = seeded(3, 4)
    expected = tuned(x)
    program = npu_iree.load(net, params=tuned.state_dict())
    for parameter in tuned.parameters():
        parameter.fill_(0)
    assert_same(program(x), expected)


@torch.no_grad()
def test_what_is_no_dense_cpu_tensor_is_made_one(net: Path, tuned: Net) -> None:
    state = {n: torch.stack([t, t], -1)[..., 0] for n, t in tuned.state_dict().items()}
    assert not state["first.weight"].is_contiguous()
    x = seeded(3, 4)
    assert_same(npu_iree.load(net, params=state)(x), tuned(x))


def test_what_is_wrong_is_told_at_once(net: Path, tuned: Net, tmp_path: Path) -> None:
    state = tuned.state_dict()
    del state["first.bias"]
    state["first.weight"] = torch.zeros(4, 8)
    state["second.weight"] = state["second.weight"].half()
    state["third.bias"] = torch.zeros(3)
    for params in (state, by_save_file(state, tmp_path)):
        with pytest.raises(npu_iree.ArtifactError) as raised:
            npu_iree.load(net, params=params)
        for line in (
            "missing: first.bias ([8] f32)",
            "misshapen: first.weight is [4, 8], not [8, 4] f32",
            "of another dtype: second.weight is f16, not [3, 8] f32",
            "extra: third.bias",
        ):
            assert line in str(raised.value)
        assert "scale" not in str(raised.value)


def test_an_irpa_file_tells_what_it_can(net: Path, tuned: Net, tmp_path: Path) -> None:
    state = {**tuned.state_dict(), "extra": torch.zeros(2), "first.bias": torch.zeros(9)}
    del state["scale"]
    with pytest.raises(npu_iree.ArtifactError) as raised:
        npu_iree.load(net, params=by_irpa(state, tmp_path))
    for line in ("missing: scale", "misshapen: first.bias has 36 bytes", "extra: extra"):
        assert line in str(raised.value)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ("nowhere.safetensors", "it cannot be read: No such file"),
        ("nowhere.irpa", "it cannot be read: No such file"),
        ("weights.bin", "are read from .irpa or .safetensors"),
    ],
)
def test_a_file_that_is_not_there(params: str, reason: str, net: Path, tmp_path: Path) -> None:
    with pytest.raises(npu_iree.ArtifactError, match=reason):
        npu_iree.load(net, params=tmp_path / params)


def test_something_else_than_tensors_with_values_is_refused(net: Path) -> None:
    state = Net().state_dict()
    name, weight = next(iter(state.items()))
    emptied = weight.clone()
    emptied.untyped_storage().resize_(0)
    reasons = {
        "is on meta, where it has no values": weight.to("meta"),
        "is torch.sparse_coo; give a dense tensor": weight.to_sparse(),
        "has more elements than its storage holds": emptied,
    }
    for reason, tensor in reasons.items():
        with pytest.raises(npu_iree.ArtifactError, match=f"params: {name} {reason}"):
            npu_iree.load(net, params={**state, name: tensor})
    with pytest.raises(npu_iree.ArtifactError, match="scale is no tensor but float"):
        npu_iree.load(net, params={**Net().state_dict(), "scale": 1.0})


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_told_by_the_name(name: str, net: Path, tmp_path: Path) -> None:
    path = by_save_parameters(Net().state_dict(), tmp_path)
    flip(path, name)
    for load in (lambda: npu_iree.load(net, params=path), lambda: load_beside(net, path)):
        with pytest.raises(npu_iree.ArtifactError) as raised:
            load()
        assert f"corrupted (the checksum differs): {name}" in str(raised.value)
        assert str(path.name) in str(raised.value)


def test_all_flipped_tensors_are_told(net: Path, tmp_path: Path) -> None:
    path = by_save_parameters(Net().state_dict(), tmp_path)
    flip(path, "scale")
    flip(path, "first.bias")
    with pytest.raises(npu_iree.ArtifactError, match=r"differs\): first.bias, scale$"):
        npu_iree.load(net, params=path)


@pytest.mark.usefixtures("shared_cache")
@pytest.mark.parametrize("suffix", ["irpa", "safetensors"])
def test_the_file_beside_is_checked_against_the_manifest(
    suffix: str, tuned: Net, net: Path, tmp_path: Path
) -> None:
    model = SmallModel(Net(), (torch.ones(2, 4),))
    path = compiled({"main": model}, tmp_path / "net.vmfb", BuildOptions(params=suffix))
    npu_iree.load(path)
    npu_iree.save_parameters(tuned.state_dict(), tmp_path / f"net.{suffix}")
    with pytest.raises(npu_iree.ArtifactError) as raised:
        npu_iree.load(path)
    assert ", ".join(NAMES) in str(raised.value)
    assert "pass the file as params=" in str(raised.value)
    npu_iree.load(path, params=tmp_path / f"net.{suffix}")
    (tmp_path / f"net.{suffix}").unlink()
    with pytest.raises(npu_iree.ArtifactError, match=f"net.{suffix}"):
        npu_iree.load(path)


def flip(path: Path, name: str) -> None:
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    data[8 + length + (begin + end) // 2] ^= 4
    path.write_bytes(data)


def load_beside(net: Path, parameters: Path) -> None:
    """Load the artifact with this file beside it."""
    copy = parameters.parent / "net.vmfb"
    copy.write_bytes(net.read_bytes())
    parameters.rename(parameters.parent / "net.safetensors")
    try:
        npu_iree.load(copy)
    except npu_iree.ArtifactError as error:
        raise npu_iree.ArtifactError(parameters, str(error)) from error


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), suffix=st.sampled_from(["irpa", "safetensors"]))
def test_a_truncated_file_is_refused(
    data: st.DataObject, suffix: str, net: Path, tmp_path: Path
) -> None:
    path = tmp_path / f"cut.{suffix}"
    npu_iree.save_parameters(Net().state_dict(), path)
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0")) if suffix == "irpa" else len(whole)  # after it is only padding
    path.write_bytes(whole[: data.draw(st.integers(0, end - 1))])
    with pytest.raises(npu_iree.ArtifactError, match=f"cut.{suffix}"):
        npu_iree.load(net, params=path)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), suffix=st.sampled_from(["irpa", "safetensors"]))
def test_a_damaged_file_crashes_nothing(
    data: st.DataObject, suffix: str, net: Path, tmp_path: Path
) -> None:
    path = tmp_path / f"bad.{suffix}"
    npu_iree.save_parameters(Net().state_dict(), path)
    damaged = bytearray(path.read_bytes())
    head = min(len(damaged), 1200)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, head - 1))
        damaged[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    with contextlib.suppress(npu_iree.ArtifactError):
        assert npu_iree.load(net, params=path)(torch.ones(2, 4)).shape == (2, 3)


@pytest.mark.parametrize("number", [b"\xff" * 8, b"\xf0" + b"\xff" * 7, b"\0" * 7 + b"\x80"])
def test_numbers_of_an_archive_that_overflow_crash_nothing(
    number: bytes, net: Path, tmp_path: Path
) -> None:
    path = by_irpa(Net().state_dict(), tmp_path)
    whole = path.read_bytes()
    for at in range(8, 320, 4):
        path.write_bytes(whole[:at] + number + whole[at + 8 :])
        with contextlib.suppress(npu_iree.ArtifactError):
            assert npu_iree.load(net, params=path)(torch.ones(2, 4)).shape == (2, 3)


def test_a_header_with_a_size_that_is_no_number_is_refused(tmp_path: Path) -> None:
    text = b'{"w": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}'
    path = tmp_path / "endless.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(npu_iree.ArtifactError, match="its header makes no sense"):
        read_parameters(path)


@torch.no_grad()
@pytest.mark.parametrize(
    "names", [("embed.weight",), ("head.weight",), ("embed.weight", "head.weight")]
)
def test_tied_weights_go_by_any_of_their_names(
    names: tuple[str, ...], tmp_path: Path, tied: Path
) -> None:
    weight = seeded(10, 8)
    model = Tied()
    model.embed.weight.copy_(weight)
    ids = torch.tensor([[1, 2, 9]])
    save_file({n: weight.clone() for n in names}, tmp_path / "t.safetensors")
    for params in (dict.fromkeys(names, weight), tmp_path / "t.safetensors"):
        assert_same(npu_iree.load(tied, params=params)(ids), model(ids))


def test_tied_weights_that_differ_are_refused(tied: Path, tmp_path: Path) -> None:
    """The artifact has one of them: to bind one and drop the other would be silently wrong."""
    params = {"embed.weight": torch.zeros(10, 8), "head.weight": torch.ones(10, 8)}
    save_file(params, tmp_path / "t.safetensors")
    for given_ in (params, tmp_path / "t.safetensors"):
        with pytest.raises(npu_iree.ArtifactError, match=r"embed.weight.*head.weight"):
            npu_iree.load(tied, params=given_)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = SmallModel(Tied(), (torch.tensor([[1, 2, 9]]),))
    return compiled({"main": model}, tmp_path_factory.mktemp("tied") / "tied.vmfb")


@torch.no_grad()
def test_embedded_parameters_are_in_the_file(tmp_path: Path, tuned: Net) -> None:
    model = SmallModel(Net(), (torch.ones(2, 4),))
    path = compiled({"main": model}, tmp_path / "net.vmfb", BuildOptions(params="embed"))
    assert [*tmp_path.iterdir()] == [path]
    x = torch.ones(2, 4)
    assert_same(npu_iree.load(path)(x), Net()(x))
    with pytest.raises(npu_iree.ArtifactError, match="compiled in"):
        npu_iree.load(path, params=tuned.state_dict())


class Turned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.turn * x)


def test_complex_parameters_are_not_embedded(tmp_path: Path) -> None:
    model = SmallModel(Turned(), (torch.ones(2, 4),))
    with pytest.raises(ExportError, match=r'turn cannot be embedded.*complex.*params="irpa"'):
        compiled({"main": model}, tmp_path / "net.vmfb", BuildOptions(params="embed"))
    assert not [*tmp_path.iterdir()]


def test_what_is_written_has_the_permissions_of_any_file(net: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    for suffix in ("irpa", "safetensors"):
        path = tmp_path / f"p.{suffix}"
        npu_iree.save_parameters(Net().state_dict(), path)
        assert path.stat().st_mode == plain.stat().st_mode
    assert net.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("suffix", ["irpa", "safetensors"])
def test_what_does_not_fit_on_the_disk_is_told_and_nothing_is_left(
    suffix: str, tmp_path: Path
) -> None:
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, most))
    try:
        with pytest.raises(npu_iree.ArtifactError, match="it cannot be written: "):
            npu_iree.save_parameters({"w": torch.ones(1000)}, tmp_path / f"w.{suffix}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
    assert not [*tmp_path.iterdir()]


def test_what_is_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    state: Mapping[str, torch.Tensor] = Net().state_dict()
    found = load_file(by_save_parameters(dict(state), tmp_path))
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)

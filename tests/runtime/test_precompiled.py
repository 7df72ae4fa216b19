"""`aot_compile`: PyTorch saves what we built, and loads it where there is no compiler."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

from lowering import bundle
from lowering.errors import ArtifactError, NpuIreeError
from programs.launch import finish, start
from programs.precompiled import FUNCTIONS, written


@pytest.fixture(autouse=True)
def _aot_compile_is_on() -> Iterator[None]:
    with torch._dynamo.config.patch(enable_aot_compile=True):
        yield


def saved(path: Path) -> bytes:
    """Return what is saved of a function that writes to its first argument."""
    arguments = (torch.ones(4), torch.ones(4))
    compiled = torch.compile(written, backend="npu_iree", fullgraph=True)
    compiled.aot_compile((arguments, {})).save_compiled_function(str(path))  # type: ignore[attr-defined]
    return path.read_bytes()


@pytest.mark.slow
def test_what_one_process_saves_another_loads_without_a_compiler(
    tmp_path: Path, runtime_only_python: Path
) -> None:
    def done(command: str, python: Path | None = None) -> list[dict[str, object]]:
        jobs = [(command, name, str(tmp_path / name)) for name in FUNCTIONS]
        return finish(start("precompiled", json.dumps(jobs), python=python))

    for name, there, here in zip(
        FUNCTIONS, done("save"), done("run", runtime_only_python), strict=True
    ):
        assert there["away"] == here["away"] < 1e-5, name  # type: ignore[operator]
        assert here["installed"] == [], name
        counts = here["counts"]
        assert isinstance(counts, dict)
        assert counts["bundle_hits"] == counts["regions"], name
        assert not {"compiles", "cache_hits"} & counts.keys(), name


def test_arguments_that_a_saved_graph_is_not_for_are_refused(tmp_path: Path) -> None:
    loaded = torch.compiler.load_compiled_function(io.BytesIO(saved(tmp_path / "file")))
    memory = torch.zeros(8)
    with pytest.raises(NpuIreeError, match="these overlap in another way"):
        loaded(memory[:4], memory[2:6])
    with forward_ad.dual_level(), pytest.raises(NpuIreeError, match="carry tangents"):
        loaded(memory[:4], forward_ad.make_dual(torch.ones(4), torch.ones(4)))
    assert torch.equal(loaded(memory[:4], torch.ones(4)), torch.full((4,), 2.0))

    compiled = torch.compile(written, backend="npu_iree", fullgraph=True)
    with pytest.raises(NpuIreeError, match="arguments which share memory"):
        compiled.aot_compile(((memory[:4], memory[2:6]), {}))  # type: ignore[attr-defined]


def test_what_is_saved_can_be_loaded_and_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = torch.compiler.load_compiled_function(io.BytesIO(saved(tmp_path / "first")))
    first.save_compiled_function(str(tmp_path / "second"))
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")  # which nothing needs
    with open(tmp_path / "second", "rb") as file:
        second = torch.compiler.load_compiled_function(file)
    assert torch.equal(second(torch.ones(4), torch.ones(4)), torch.full((4,), 4.0))


def test_damage_and_other_machines_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = saved(tmp_path / "file")
    place = data.index(b'"format"')
    damaged = data[:place] + bytes(20) + data[place + 20 :]
    with pytest.raises(ArtifactError, match=r"what aot_compile has saved: .* damaged"):
        torch.compiler.load_compiled_function(io.BytesIO(damaged))
    monkeypatch.setattr(bundle, "missing_features", lambda features: ["avx99"])
    with pytest.raises(ArtifactError, match="for a CPU with avx99"):
        torch.compiler.load_compiled_function(io.BytesIO(data))

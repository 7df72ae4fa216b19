"""Bundles: saved in one process, run in another that has no compiler; refused with the reason."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import statistics
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.exc import BackendCompilerFailed

import npu_iree
from lowering import cpu
from lowering.archive import archive_bytes
from lowering.bundle import FORMAT, MANIFEST, Bundle
from lowering.errors import ArtifactError, NotCompiledError
from lowering.key import IDENTITY, CacheKey
from npu_iree import bundles, toolchain
from programs.launch import finish, run, start
from tolerances import assert_same

Members = dict[str, bytes]


Job = tuple[str, str, Path] | tuple[str, str, Path, dict[str, str]]


def done(*jobs: Job, python: Path | None = None, **env: str) -> list[dict[str, Any]]:
    """Do jobs in a process of their own; return its answer to each."""
    return finish(start("bundled", json.dumps(jobs, default=str), python=python, **env))


@pytest.mark.slow
def test_what_one_process_saves_another_runs_without_a_compiler(
    tmp_path: Path, runtime_only_python: Path
) -> None:
    hits = {"graph-break": 3, "training": 2, "dynamic": 2}
    files = {name: tmp_path / f"{name}.npub" for name in hits}
    saved = done(*(("save", *item) for item in files.items()))
    ran = done(*(("run", *item) for item in files.items()), python=runtime_only_python)
    for name, there, here in zip(hits, saved, ran, strict=True):
        assert there["counts"]["compiles"] >= 1, name
        assert (here["error"], here["compilers"], here["installed"]) == ("", [], []), name
        assert here["away"] == there["away"] < 1e-5, name
        assert here["counts"]["bundle_hits"] == hits[name], name
        assert not {"compiles", "cache_hits", "healed_ops", "denials"} & here["counts"].keys()
        for count in ("graphs", "regions", "host_ops"):
            assert here["counts"][count] == there["counts"][count], name


@pytest.mark.sweep
def test_what_healing_found_is_found_in_the_bundle(
    tmp_path: Path, runtime_only_python: Path
) -> None:
    file = tmp_path / "model.npub"
    fault = "torch-to-linalg:abort:aten.tanh.default"
    (saved,) = done(("save", "refused", file), NPU_IREE_FAULT=fault)
    assert saved["counts"]["healed_ops"] == 1
    (ran,) = done(("run", "refused", file), python=runtime_only_python)
    assert (ran["error"], ran["warnings"]) == ("", [])
    assert ran["counts"]["bundle_hits"] == ran["counts"]["regions"] == 2
    (graph,) = Bundle(file).graphs.values()
    assert [op.op for op in graph.host_ops] == ["aten.tanh.default"]
    assert "died of SIGABRT" in graph.failed[1]


@pytest.mark.sweep
def test_what_a_bundle_lacks_is_an_error_or_runs_in_eager_or_is_compiled(
    tmp_path: Path, runtime_only_python: Path
) -> None:
    file = tmp_path / "plain.npub"  # called once, without gradients, with 4 rows of f32
    shape = "input x: f32[4,8] then, f32[5,8] now"
    differences = {
        "other-shape": shape,
        "host-op": "aten.median.default: 0 times then, 1 times now",
        "training": "inference graphs only: save it after a call with gradients and backward()",
    }
    eager, if_missing = {"compile": "eager"}, {"compile": "if_missing"}

    _, found, compiled = done(
        ("save", "plain", file),
        ("run", "plain", file, if_missing),
        ("run", "other-shape", file, if_missing),
    )
    assert (found["counts"]["bundle_hits"], found["counts"].get("compiles")) == (1, None)
    assert (compiled["counts"]["compiles"], compiled["counts"].get("bundle_hits")) == (1, None)
    assert compiled["away"] < 1e-5

    *refused, in_eager, trained, lacking = done(
        *(("run", name, file) for name in differences),
        ("run", "other-shape", file, eager),
        ("run", "training", file, eager),
        ("run", "plain", file, if_missing),
        python=runtime_only_python,
    )
    for answer, difference in zip(refused, differences.values(), strict=True):
        assert answer["error"].startswith("NotCompiledError: ")
        assert difference in answer["error"]
        assert str(file) in answer["error"]
    assert (in_eager["error"], in_eager["away"]) == ("", 0.0)
    (warning,) = in_eager["warnings"]
    assert "runs on PyTorch's CPU kernels" in warning
    assert shape in warning
    assert trained["error"] == ""
    assert trained["away"] < 1e-5
    assert "VersionError" in lacking["error"]
    assert lacking["compilers"] == []


# In this process, on small functions:

ON_HOST = {"disabled_ops": ["relu", "mul", "add", "exp", "threshold_backward"]}  # what is quick


def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * self.scale


X = torch.randn(4, 8)


def saved(function: Callable[..., Any], file: Path, *args: Any, **options: Any) -> Path:
    compiled = torch.compile(function, backend="npu_iree", options=options or None)
    compiled(*(args or (X,)))
    npu_iree.save_bundle(compiled, file)
    torch._dynamo.reset()
    return file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of `doubled`."""
    return saved(doubled, tmp_path_factory.mktemp("doubled") / "doubled.npub")


def members(file: Path) -> Members:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def call(file: Path, *args: Any, function: Callable[..., Any] = doubled, **options: Any) -> Any:
    options = {"bundle": file, "compile": "never", **options}
    compiled = torch.compile(function, backend="npu_iree", options=options)
    return compiled(*(args or (X,)))


def refusal(file: Path, *args: Any, **options: Any) -> str:
    with pytest.raises(BackendCompilerFailed) as raised:
        call(file, *args, **options)
    inner = raised.value.inner_exception
    assert isinstance(inner, (ArtifactError, NotCompiledError))
    return str(inner)


def test_a_bundle_runs_where_it_was_saved(file: Path, counts: Counter[str]) -> None:
    assert_same(call(file), doubled(X))
    assert (counts["bundle_hits"], counts["compiles"]) == (1, 0)


@pytest.mark.parametrize(
    ("args", "options", "difference"),
    [
        ((X.double(),), {}, "input x: f32[4,8] then, f64[4,8] now"),
        ((X[0],), {}, "input x: f32[4,8] then, f32[8] now"),
        ((X.t().contiguous().t(),), {}, "f32[4,8] in memory order 1,0 now"),
        ((X,), {"flags": ["--iree-opt-level=O1"]}, "option flags: none when it was saved"),
        ((X,), {"flags": ["--iree-opt-level=O1"]}, "the nearest region differs in flags"),
        ((X,), {"function": lambda x: torch.relu(x) * 3}, "then, %2 = aten.mul"),
        ((X,), {"function": lambda x: torch.exp(x) * 2}, "aten.exp.default: 0 times then, 1"),
    ],
)
def test_a_graph_that_is_not_in_it_is_told_from_the_nearest(
    args: Any, options: Any, difference: str, file: Path
) -> None:
    assert difference in refusal(file, *args, **options)


def test_an_op_sent_to_the_host_is_told_as_an_option(tmp_path: Path) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(torch.tanh(x) * 2) + 1

    file = saved(both, tmp_path / "x.npub")
    text = refusal(file, function=both, disabled_ops=["exp"])
    assert "option disabled_ops: none when it was saved, exp now" in text


def test_a_changed_capability_table_is_told(file: Path, tmp_path: Path) -> None:
    content = members(file)
    manifest = json.loads(content[MANIFEST])
    manifest["capabilities"] = "0" * 64
    manifest["versions"]["torch"] = "2.0"
    text = refusal(written(tmp_path, content, manifest), X.double())
    assert "the capability table of target 'npu-local' has changed" in text
    assert f"torch 2.0 when it was saved, {version('torch')} now" in text


def written(folder: Path, content: Members, manifest: Any) -> Path:
    path = folder / "changed.npub"
    path.write_bytes(archive_bytes({**content, MANIFEST: json.dumps(manifest).encode()}))
    return path


def test_a_bundle_for_another_target_is_refused(file: Path) -> None:
    expected = f"cannot use {file}: it was saved for target 'npu-local', and this is 'npu-virtual'"
    assert refusal(file, target="npu-virtual") == expected
    assert refusal(file, target="npu-virtual", compile="if_missing") == expected


def test_a_bundle_for_another_cpu_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = [n for n in Bundle(file).origin.cpu_features if n not in ("x86_64", "sse2")]
    here = frozenset({"x8664", "sse2"})  # as /proc/cpuinfo of a machine of 2003 has it
    monkeypatch.setattr(cpu, "_features_here", lambda: here)
    lacking = ", ".join(needed)
    expected = (
        f"cannot use {file}: its code is for a CPU with {lacking}, which this one does not have"
    )
    assert refusal(file) == expected


@pytest.mark.parametrize("found", [FORMAT + 1, 0, "1", None])
def test_a_bundle_of_another_format_is_refused(found: Any, file: Path, tmp_path: Path) -> None:
    content = members(file)
    manifest = {**json.loads(content[MANIFEST]), "format": found}
    path = written(tmp_path, content, manifest)
    assert f"it has format {found!r}, and this version of npu_iree reads {FORMAT}" in refusal(path)


def test_a_bundle_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.npub"
    assert refusal(path) == f"cannot use {path}: No such file or directory"


def test_options_that_contradict_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = npu_iree.Options.parse
    with pytest.raises(npu_iree.OptionError, match="compile='eager' sends whole graphs there"):
        parse({"compile": "eager", "fallback": "error"})
    with pytest.raises(npu_iree.OptionError, match="'if_missing'"):
        parse({"compile": "if-missing"})
    with pytest.raises(npu_iree.OptionError, match="the path of a file"):
        parse({"bundle": 3})
    monkeypatch.setenv("NPU_IREE_CACHE", "off")
    with pytest.raises(npu_iree.OptionError, match="no bundle and no cache"):
        toolchain.compiler_for(parse({"compile": "never"}))


def test_never_without_a_bundle_takes_what_the_cache_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: Counter[str]
) -> None:
    monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path))
    with pytest.raises(BackendCompilerFailed, match=r"not in the cache.*\n.*the cache is empty"):
        torch.compile(doubled, backend="npu_iree", options={"compile": "never"})(X)
    torch.compile(doubled, backend="npu_iree")(X)
    torch._dynamo.reset()
    compiled = torch.compile(doubled, backend="npu_iree", options={"compile": "never"})
    assert_same(compiled(X), doubled(X))
    assert (counts["compiles"], counts["cache_hits"]) == (1, 1)
    with pytest.raises(BackendCompilerFailed, match=r"differs in \['program'\]"):
        compiled(X.double())


def graphs_in(compiled: Any, file: Path) -> list[str]:
    npu_iree.save_bundle(compiled, file)
    return sorted(record.kind for record in Bundle(file).graphs.values())


def test_a_bundle_holds_the_graphs_of_its_model_alone(tmp_path: Path) -> None:
    one = torch.compile(torch.nn.Sequential(Scaled()), backend="npu_iree", options=ON_HOST)
    other = torch.compile(torch.nn.Sequential(torch.nn.ReLU()), backend="npu_iree", options=ON_HOST)
    with torch.no_grad():
        one(X)
        other(X)
        other(torch.randn(3, 8, 2))
    assert graphs_in(one, tmp_path / "one") == ["inference"]
    assert graphs_in(other, tmp_path / "other") == ["inference"] * 2


def test_a_graph_that_two_calls_of_torch_compile_share_is_in_the_bundles_of_both(
    tmp_path: Path, counts: Counter[str]
) -> None:
    for make in (lambda: doubled, lambda: Scaled().requires_grad_(False)):
        counts.clear()
        one, other = (torch.compile(make(), backend="npu_iree", options=ON_HOST) for _ in range(2))
        one(X)
        other(X)
        assert counts["graphs"] == 1
        assert graphs_in(one, tmp_path / "one") == ["inference"]
        assert graphs_in(other, tmp_path / "other") == ["inference"]


def test_a_module_that_is_compiled_in_place_is_saved(tmp_path: Path) -> None:
    model = Scaled()
    model.compile(backend="npu_iree", options=ON_HOST)
    model(X).sum().backward()
    assert graphs_in(model, tmp_path / "x") == ["backward", "forward"]


def test_a_compiled_function_that_calls_another_keeps_its_graphs(tmp_path: Path) -> None:
    inner = torch.compile(doubled, backend="npu_iree", options=ON_HOST)

    @torch.compile(backend="npu_iree", options=ON_HOST)
    def outer(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return inner(y).exp()

    outer(X)
    assert graphs_in(outer, tmp_path / "outer") == ["inference"] * 2
    with pytest.raises(npu_iree.NpuIreeError, match="nothing was built"):
        npu_iree.save_bundle(inner, tmp_path / "inner")


def test_equal_content_is_saved_as_equal_bytes(tmp_path: Path) -> None:
    compiled = torch.compile(doubled, backend="npu_iree")
    compiled(X)
    one, other = (npu_iree.save_bundle(compiled, tmp_path / name) for name in "ab")
    assert one.read_bytes() == other.read_bytes()


def test_save_says_that_nothing_was_built(tmp_path: Path) -> None:
    path = tmp_path / "x.npub"
    with pytest.raises(npu_iree.NpuIreeError, match="call it first"):
        npu_iree.save_bundle(torch.compile(doubled, backend="npu_iree"), path)
    eager = torch.compile(doubled, backend="eager")
    eager(X)
    with pytest.raises(npu_iree.NpuIreeError, match=r"backend=.npu_iree"):
        npu_iree.save_bundle(eager, path)
    for thing in (doubled, torch.nn.ReLU(), 3):
        with pytest.raises(npu_iree.NpuIreeError, match="save_bundle takes what"):
            npu_iree.save_bundle(thing, path)  # type: ignore[arg-type]
    assert not path.exists()


def test_save_says_where_it_cannot_write(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("not a folder")
    with pytest.raises(ArtifactError, match="cannot be written"):
        saved(doubled, place / "x.npub", **ON_HOST)
    assert [*tmp_path.iterdir()] == [place]


def test_what_was_built_is_forgotten_with_its_graph() -> None:
    def fresh(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 5

    gc.collect()
    before = len(bundles._BUILT)
    compiled = torch.compile(fresh, backend="npu_iree", options=ON_HOST)
    compiled(X)
    assert len(bundles._BUILT) == before + 1
    torch._dynamo.reset()
    gc.collect()
    assert len(bundles._BUILT) == before
    with pytest.raises(npu_iree.NpuIreeError, match="nothing was built"):
        npu_iree.save_bundle(compiled, "x.npub")


def test_a_replaced_bundle_is_read_again(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.npub"
    path.write_bytes(file.read_bytes())
    assert_same(call(path), doubled(X))
    saved(doubled, path, X.double())
    torch._dynamo.reset()
    assert "input x: f64[4,8] then" in refusal(path)
    assert_same(call(path, X.double()), doubled(X.double()))


# Damaged and made to do harm:


def everything(path: Path) -> Any:
    """Read all that a bundle holds."""
    bundle = Bundle(path)
    keys = [CacheKey(dict(zip(IDENTITY, parts, strict=True))) for parts in bundle.artifacts]
    texts = {digest: bundle.text(digest) for digest in bundle.graphs}
    return texts, [bundle.entry(key) for key in keys]


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_a_damaged_bundle_is_refused_or_as_it_was(
    data: st.DataObject, file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    good = file.read_bytes()
    damaged = bytearray(good)
    if data.draw(st.booleans()):
        damaged[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[data.draw(st.integers(0, len(good) - 1)) :]
    path = tmp_path_factory.getbasetemp() / "damaged.npub"
    path.write_bytes(damaged)
    with contextlib.suppress(ArtifactError):
        assert everything(path) == everything(file)


leaves = st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.floats() | st.text(max_size=8)
junk = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_a_manifest_that_lies_crashes_nothing(
    data: st.DataObject, file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = members(file)
    manifest = json.loads(content[MANIFEST])
    where: Any = manifest
    name = data.draw(st.sampled_from(sorted(where)))
    while isinstance(where[name], (dict, list)) and where[name] and data.draw(st.booleans()):
        where = where[name]
        names = sorted(where) if isinstance(where, dict) else range(len(where))
        name = data.draw(st.sampled_from(list(names)))
    where[name] = data.draw(junk)
    path = written(tmp_path_factory.getbasetemp(), content, manifest)
    refusal = None
    try:
        Bundle(path).refuse_unless_for("npu-local")
        texts, _ = everything(path)
    except ArtifactError as error:
        refusal = error
    if refusal is None:
        assert texts.items() <= everything(file)[0].items(), "a text is known by its digest"
    else:
        assert refusal.reason
        assert str(path) in str(refusal)


@pytest.mark.parametrize("manifest", [b"", b"{", b"null", b"[]", b"3", b"\xff", b"[" * 100_000])
def test_a_manifest_that_is_none_is_refused(manifest: bytes, file: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.npub"
    path.write_bytes(archive_bytes({**members(file), MANIFEST: manifest}))
    assert str(path) in refusal(path)


OPEN = """
import resource, sys
from pathlib import Path
from lowering.bundle import Bundle
from lowering.errors import ArtifactError
pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + (128 << 20),) * 2)
for path in sys.argv[1:]:
    try:
        Bundle(Path(path))
    except ArtifactError as error:
        print("refused:", error.reason)
"""
BOMBS = (b"[" + b"[]," * (16 << 20) + b"0]", b" " * (128 << 20))  # as objects, or as bytes alone


def test_a_manifest_that_is_a_bomb_is_refused_within_a_memory_limit(tmp_path: Path) -> None:
    padding = random.Random(0).randbytes(1 << 20)  # or the directory's numbers give it away
    paths = [tmp_path / f"{i}.npub" for i in range(len(BOMBS))]
    for path, bomb in zip(paths, BOMBS, strict=True):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(MANIFEST, bomb)
            archive.writestr("artifacts/x.npua", padding)
    done = subprocess.run([sys.executable, "-c", OPEN, *paths], capture_output=True, text=True)
    assert done.stdout.count("refused: its member 'bundle.json' has") == len(BOMBS), done


def test_a_record_that_names_ops_that_are_not_there_is_refused(file: Path, tmp_path: Path) -> None:
    content = members(file)
    manifest = json.loads(content[MANIFEST])
    manifest["graphs"][0]["failed"] = {"99": "because"}
    assert "names an op that is not in it" in refusal(written(tmp_path, content, manifest))


def test_an_artifact_in_the_place_of_another_is_refused(file: Path, tmp_path: Path) -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 7

    (theirs,) = (
        data for name, data in members(saved(other, tmp_path / "o")).items() if "npua" in name
    )
    content = members(file)
    (name,) = (name for name in content if "npua" in name)
    path = tmp_path / "x.npub"
    path.write_bytes(archive_bytes({**content, name: theirs}))
    assert "is not what its manifest says" in refusal(path)


def test_a_renamed_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npub"
    path.write_bytes(archive_bytes({"a/data.pkl": b"..."}))
    assert refusal(path) == f"cannot use {path}: it has no member 'bundle.json'"


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["bert", "resnet50", "llama", "vit", "gpt2"])
def test_a_first_call_costs_at_most_1_3_of_aot_eager(
    name: str, tmp_path: Path, runtime_only_python: Path
) -> None:
    file = str(tmp_path / "x.npub")
    run("first_call", name, "save", file)
    ratios = []
    for _ in range(5):
        eager = run("first_call", name, "aot_eager", file, python=runtime_only_python)
        ours = run("first_call", name, "run", file, python=runtime_only_python)
        ratios.append(ours["first_call_s"] / eager["first_call_s"])
    assert statistics.median(ratios) <= 1.3, ratios

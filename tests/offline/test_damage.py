"""Artifacts that are damaged, or made to do harm: one clear error, no crash, nothing written."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import npu_iree
from command import invoke
from lowering.arithmetic import evaluate
from lowering.manifest import MEMBER, Manifest
from lowering.vmfb import pack, unpack
from npu_iree.offline.trees import read_tree
from runtime_env import ROOT

MANY = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
Row = dict[str, Any]


@pytest.fixture
def artifact(net: Path, tmp_path: Path) -> Path:
    """A copy of the artifact and its parameters, alone in a folder."""
    for name in ("net.vmfb", "net.safetensors"):
        shutil.copy(net.parent / name, tmp_path / name)
    return tmp_path / "net.vmfb"


def load_or_refuse(path: Path, data: bytes) -> npu_iree.ArtifactError | None:
    """Load these bytes; what is loaded runs, and nothing appears beside them."""
    path.write_bytes(data)
    before = {*path.parent.iterdir()}
    found = None
    try:
        assert npu_iree.load(path)(torch.ones(2, 4)).shape == (2, 3)
    except npu_iree.ArtifactError as error:
        found = error
    assert {*path.parent.iterdir()} == before
    if found is not None:
        assert str(path.parent) in str(found)
        assert len(found.reason) < 1000
    return found


def with_manifest(path: Path, change: Callable[[Row], object]) -> bytes:
    """Return the artifact with another manifest, written as an artifact's is."""
    manifest, module = unpack(path)
    row = json.loads(manifest.to_json())
    changed = change(row)
    text = changed if isinstance(changed, str) else json.dumps(row)
    file = io.BytesIO(module)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, text)
    return file.getvalue()


def refusal(path: Path, change: Callable[[Row], object]) -> str:
    error = load_or_refuse(path, with_manifest(path, change))
    assert error is not None
    return error.reason


# Bytes.


@MANY
@given(data=st.data())
def test_a_truncated_artifact_is_refused(data: st.DataObject, artifact: Path, net: Path) -> None:
    whole = net.read_bytes()
    assert load_or_refuse(artifact, whole[: data.draw(st.integers(0, len(whole) - 1))])


@MANY
@given(data=st.data())
def test_a_flipped_bit_is_refused_or_harmless(
    data: st.DataObject, artifact: Path, net: Path
) -> None:
    whole = bytearray(net.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    assert load_or_refuse(artifact, bytes(whole)) or unpack(artifact) == unpack(net)


def test_a_flipped_bit_in_each_region_is_refused(artifact: Path, net: Path) -> None:
    whole = net.read_bytes()
    manifest, module = unpack(net)
    directory = whole.index(b"PK\x01\x02", len(module))
    regions = {
        "module": (0, len(module)),
        "manifest": (whole.index(MEMBER.encode(), len(module)) + len(MEMBER), directory),
        "end": (whole.rindex(b"PK\x05\x06"), whole.rindex(b"PK\x05\x06") + 4),
    }
    for name, (begin, end) in regions.items():
        for at in range(begin, end, max(1, (end - begin) // 12)):
            damaged = bytearray(whole)
            damaged[at] ^= 0x10
            refused = load_or_refuse(artifact, bytes(damaged))
            # Only the bits that fill up the last byte of what is compressed mean nothing.
            assert refused or unpack(artifact) == (manifest, module), (name, at)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@MANY
@given(
    members=st.lists(st.tuples(st.text(max_size=20), st.binary(max_size=200)), max_size=4),
    data=st.data(),
)
def test_any_zip_is_refused(
    members: list[tuple[str, bytes]], data: st.DataObject, artifact: Path
) -> None:
    file = io.BytesIO(data.draw(st.binary(max_size=64)))
    with contextlib.suppress(ValueError, UserWarning), zipfile.ZipFile(file, "a") as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content)
        if data.draw(st.booleans()):
            archive.writestr(MEMBER, data.draw(st.binary(max_size=100)))
    assert load_or_refuse(artifact, file.getvalue())


def test_a_renamed_file_runs_and_renamed_parameters_are_missed(artifact: Path) -> None:
    other = artifact.rename(artifact.parent / "other.bin")
    assert npu_iree.load(other)(torch.ones(2, 4)).shape == (2, 3)
    (artifact.parent / "net.safetensors").rename(artifact.parent / "other.safetensors")
    with pytest.raises(npu_iree.ArtifactError, match=r"net\.safetensors"):
        npu_iree.load(other)
    npu_iree.load(other, params=artifact.parent / "other.safetensors")


def test_parameters_in_place_of_an_artifact_are_refused(artifact: Path) -> None:
    with pytest.raises(npu_iree.ArtifactError, match=r"read from \.irpa or \.safetensors"):
        npu_iree.load(artifact, params=artifact)
    assert load_or_refuse(artifact, (artifact.parent / "net.safetensors").read_bytes())


def test_a_plain_module_is_no_artifact(artifact: Path) -> None:
    _manifest, module = unpack(artifact)
    file = io.BytesIO(module)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("other.json", "{}")
    error = load_or_refuse(artifact, file.getvalue())
    assert error is not None
    assert "it has no npu_iree.json" in error.reason


def test_a_module_that_is_no_module_is_refused(artifact: Path) -> None:
    manifest, _module = unpack(artifact)
    file = io.BytesIO(b"\0" * 200)
    with zipfile.ZipFile(file, "a"):
        pass
    error = load_or_refuse(artifact, pack(file.getvalue(), manifest))
    assert error is not None
    assert "IREE cannot load it" in error.reason


def test_the_module_of_another_artifact_is_refused(artifact: Path, cache_artifact: Path) -> None:
    """Checksums are right; the manifest is just not that of the module."""
    manifest, _ = unpack(artifact)
    _, module = unpack(cache_artifact)
    file = io.BytesIO(module)
    with zipfile.ZipFile(file, "a"):
        pass
    assert load_or_refuse(artifact, pack(file.getvalue(), manifest))


# Manifests that lie.


def entry(row: Row) -> Row:
    found: Row = row["entries"]["main"]
    return found


LIES: dict[str, tuple[Callable[[Row], object], str]] = {
    "shape of the function": (
        lambda r: entry(r)["function"]["outputs"][0].update(shape=["s", 9], order=[0, 1]),
        "lies about main",
    ),
    "shape of an argument": (
        lambda r: entry(r)["arguments"][0]["spec"].update(shape=[2, 4, 1], order=[0, 1, 2]),
        "main: a value is f32 of 3 dimensions",
    ),
    "dtype of an argument": (
        lambda r: entry(r)["arguments"][0]["spec"].update(dtype="f64"),
        "main: a value is f64",
    ),
    "unknown dtype": (
        lambda r: r["parameters"][0].update(dtype="f99"),
        "knows no dtype f99",
    ),
    "count of results": (
        lambda r: entry(r)["function"]["outputs"].append(entry(r)["function"]["outputs"][0]),
        "lies about main",
    ),
    "result that is not there": (
        lambda r: entry(r)["outputs"][0].update(index=7),
        "there is no result 7",
    ),
    "argument that is a result": (
        lambda r: entry(r)["takes"][0].update(kind="result"),
        "no function takes a result",
    ),
    "no entry points": (lambda r: r.update(entries={}), "it has no entry points"),
    "entry that is not there": (
        lambda r: r["entries"].update(other=entry(r)),
        "IREE cannot load it",
    ),
    "shape of a parameter": (
        lambda r: r["parameters"][0].update(shape=[10**30]),
        "misshapen: first.bias",
    ),
    "negative shape": (
        lambda r: r["parameters"][0].update(shape=[-4, -2]),
        "",
    ),
    "empty and absurd shape": (
        lambda r: r["parameters"][0].update(shape=[0, 2**62, 2**62]),
        "misshapen: first.bias",
    ),
    "parameter file elsewhere": (
        lambda r: r.update(parameter_file="../net.safetensors"),
        "is not beside it",
    ),
    "parameter file at the root": (
        lambda r: r.update(parameter_file="/etc/passwd.irpa"),
        "is not beside it",
    ),
    "parameter file with a zero": (
        lambda r: r.update(parameter_file="net\0.irpa"),
        "is not beside it",
    ),
    "parameter file of an odd kind": (
        lambda r: r.update(parameter_file="net.vmfb"),
        "are read from",
    ),
    "checksum of a parameter": (
        lambda r: r["parameters"][2].update(sha256="0" * 64),
        "(the checksum differs): scale",
    ),
    "state that is not there": (lambda r: r.update(states=["nowhere"]), "no state 'nowhere'"),
    "module of no length": (lambda r: r.update(module_bytes=0), "a module of 0 bytes"),
    "module of absurd length": (lambda r: r.update(module_bytes=10**30), "a module of 1000"),
    "checksum of the module": (lambda r: r.update(module_sha256="x"), "its module is damaged"),
    "newer format": (
        lambda r: r.update(format=2),
        "and this version of npu_iree reads format 1: a newer one",
    ),
    "older format": (lambda r: r.update(format=0), ": an older or damaged one"),
    "no JSON": (lambda r: "{", "its manifest is no JSON"),
    "deep JSON": (lambda r: "[" * 200_000, "too deep"),
    "other JSON": (lambda r: "[1]", "its manifest has format None"),
    "no text": (lambda r: "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "no JSON"),
    "deep tree": (
        lambda r: entry(r).update(in_tree="[1," + "[" * 50_000),
        "no structure of values",
    ),
    "wide tree": (
        lambda r: entry(r).update(
            in_tree='[1,{"type":"builtins.tuple","context":"null","children_spec":['
            + ",".join(['{"type":null,"context":null,"children_spec":[]}'] * 3)
            + "]}]"
        ),
        "in_tree and arguments do not match",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(lie: str, artifact: Path) -> None:
    change, reason = LIES[lie]
    assert reason in refusal(artifact, change)


def test_inspect_refuses_a_manifest_that_lies(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact.write_bytes(with_manifest(artifact, LIES["unknown dtype"][0]))
    done = invoke(monkeypatch, capsys, "inspect", artifact)
    assert (done.code, "knows no dtype f99" in done.err) == (5, True)


def test_unknown_fields_are_ignored(artifact: Path) -> None:
    """A later version may add some without a new format."""
    data = with_manifest(artifact, lambda r: (r.update(new=1), entry(r).update(new=[2])))
    assert load_or_refuse(artifact, data) is None


def test_a_manifest_is_written_as_it_is_read(net: Path, cache_artifact: Path) -> None:
    for path in (net, cache_artifact):
        manifest, _ = unpack(path)
        assert Manifest.from_json(manifest.to_json()) == manifest
        assert dataclasses.replace(manifest, target="x") != manifest


def test_a_huge_manifest_is_refused(artifact: Path) -> None:
    honest = os.urandom(1 << 20).hex()  # what is smaller by so much is refused for that
    assert "at most 67108864 are read" in refusal(
        artifact, lambda r: json.dumps({**r, "x": honest + "x" * (64 << 20)})
    )


@pytest.mark.parametrize(("name", "seed"), [("net", 0), ("cache", 1000), ("signatures", 2000)])
def test_random_lies_crash_nothing(
    name: str, seed: int, net: Path, cache_artifact: Path, signatures_artifact: Path
) -> None:
    path = {"net": net, "cache": cache_artifact, "signatures": signatures_artifact}[name]
    assert adversary(path, seed, 300)["ran"] > 10


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["net", "cache", "signatures"])
def test_many_random_lies_crash_nothing(
    name: str, net: Path, cache_artifact: Path, signatures_artifact: Path
) -> None:
    path = {"net": net, "cache": cache_artifact, "signatures": signatures_artifact}[name]
    assert adversary(path, 10_000, 30_000)["ran"] > 10


def adversary(path: Path, seed: int, count: int) -> dict[str, int]:
    script = ROOT / "tests" / "programs" / "adversary.py"
    done = subprocess.run(
        [sys.executable, str(script), str(path), str(seed), str(count)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found


# Expressions of sizes, and structures of values.

expressions = st.recursive(
    st.one_of(
        st.sampled_from(["s0", "s1", "Max", "int", "__import__"]),
        st.integers(-(10**30), 10**30).map(str),
        st.floats(allow_nan=False).map(str),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "<<"]), inner).map(
            lambda t: f"({t[0]}{t[1]}{t[2]})"
        ),
        st.tuples(st.sampled_from(["Max", "Mod", "floor", "eval", "FloorDiv"]), inner, inner).map(
            lambda t: f"{t[0]}({t[1]},{t[2]})"
        ),
    ),
    max_leaves=20,
)


@pytest.mark.timeout(120)
@settings(deadline=None, max_examples=200)
@given(expressions)
def test_every_expression_of_sizes_ends_in_a_number_or_a_refusal(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(evaluate(text, {"s0": 7, "s1": 2**31}), int | float | complex)


@pytest.mark.timeout(20)  # some would take hours
@pytest.mark.parametrize(
    "text",
    ["9**9**9", "2**(2**40)", "(" * 3000, "-" * 10_000 + "1", "1+" * 10_000 + "1", "1<<99999999",
     "s0**-1", "(-8)**0.5", "1/0", "s0//0", "1e308*10//1", "Max()", "Max(s0, None)", "s0.real",
     "'a'*99999999", "[0]*99999999", "floor(1e400)", "()", "", "\0", "lambda: 0"] ,
)  # fmt: skip
def test_an_expression_made_to_do_harm_ends_in_a_number_or_a_refusal(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(evaluate(text, {"s0": 7}), int | float | complex)


def test_a_product_that_grows_is_refused() -> None:
    """Each factor is honest; together they are no size."""
    with pytest.raises(ValueError, match="no size"):
        evaluate("*".join(["s0"] * 100), {"s0": 2**40})


trees = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=5), st.booleans()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.fixed_dictionaries(
            {
                "type": st.one_of(
                    st.none(),
                    st.sampled_from(
                        [
                            "builtins.tuple",
                            "builtins.dict",
                            "collections.namedtuple",
                            "collections.defaultdict",
                            "collections.deque",
                            "x.Y",
                        ]
                    ),
                ),
                "context": st.one_of(
                    inner, st.sampled_from(["null", '["a","b"]', '{"dict_context":["a"]}', "["])
                ),
                "children_spec": st.lists(inner, max_size=3),
            }
        ),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(trees)
def test_any_tree_is_read_or_refused(tree: object) -> None:
    with contextlib.suppress(ValueError):
        found = read_tree(json.dumps([1, tree]))
        value = found.unflatten(iter(range(found.leaves)))
        with contextlib.suppress(TypeError):  # a type that is not known here is read as a tuple
            assert [*found.flatten(value)] == [*range(found.leaves)]
        with contextlib.suppress(TypeError):
            list(found.flatten({"a": 1}))


# Files made to take all memory: read by a process that has little.

READ = """
import resource, sys
import npu_iree, lowering.vmfb
from npu_iree.errors import ArtifactError
from pathlib import Path
pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + (256 << 20),) * 2)
for path in sys.argv[1:]:
    try:
        lowering.vmfb.unpack(Path(path))
        print("read")
    except ArtifactError as error:
        print("refused:", error.reason)
"""


def bomb(path: Path) -> bytes:
    """A manifest of half a GiB of zeros, in half a MiB."""
    _, module = unpack(path)
    file = io.BytesIO(module)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, bytes(1 << 29))
    return file.getvalue()


def declared_small(bomb: bytes) -> bytes:
    data = bytearray(bomb)
    at = data.rindex(b"PK\x01\x02")
    struct.pack_into("<I", data, at + 24, 100)
    return bytes(data)


def wide(path: Path) -> bytes:
    """A million arguments."""
    return with_manifest(path, lambda r: entry(r).update(names=["x"] * 3_000_000))


@pytest.mark.slow
def test_little_memory_is_enough_to_refuse(artifact: Path) -> None:
    large = bomb(artifact)
    made = {"bomb": large, "declared-small": declared_small(large), "wide": wide(artifact)}
    paths = [artifact.parent / name for name in made]
    for path, data in zip(paths, made.values(), strict=True):
        path.write_bytes(data)
    before = {*artifact.parent.iterdir()}
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, paths)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    told = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert (told[:2], len(told)) == (["refused", "refused"], 3), done.stdout
    assert {*artifact.parent.iterdir()} == before

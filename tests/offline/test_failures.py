"""What cannot be compiled, run or loaded: an exit code by its kind, and a message that says why."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npu_iree
from command import Ended, invoke
from lowering.decompositions import decomposition_table
from lowering.errors import ExportError
from lowering.files import write_atomically
from lowering.vmfb import read_manifest
from models.small import Net, SmallModel, compiled
from npu_iree.errors import TargetError
from npu_iree.offline import build
from npu_iree.offline.build import BuildOptions, write_artifact
from npu_iree.offline.parameter_files import save_parameters
from npu_iree.offline.sources import load_examples
from npu_iree.offline.verify import compare_results

Command = Callable[..., Ended]
SOURCES = """
import torch

class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, x):
        return torch.relu(self.layer(x))

class Hosted(torch.nn.Module):
    def forward(self, x):
        a = torch.median(x)
        b = torch.linalg.inv(x + 1)
        return a + torch.mode(b)[0]

class Branches(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, (x,))

class Masked(torch.nn.Module):
    def forward(self, ids, mask):
        return ids * mask

class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
    def forward(self, x):
        self.count.add_(1)
        return x + self.count

def small(): return Small(), (torch.randn(2, 4),)
def hosted(): return Hosted(), (torch.randn(4, 4),)
def branches(): return Branches(), (torch.randn(4, 4),)
def masked(): return Masked(), (torch.ones(2, 5), torch.ones(2, 5))
def counts(): return Counts(), (torch.zeros(2),)
def pair(): return {"a": small(), "b": counts()}
def narrow(): return Small(), (torch.randn(2, 3),)
def shared(): return SHARED, (torch.randn(2, 4),)
def again(): return SHARED, (torch.randn(3, 4),)
def nothing(): return 3
def fails(): return {}["key"]
def ends(): raise SystemExit("usage: model")
def control(): return Control(), (torch.ones(3),)

class Control(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

SHARED = Small()
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return lambda *args: invoke(monkeypatch, capsys, *args)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sources") / "sources.py"
    path.write_text(SOURCES)
    return path


def test_all_ops_that_cannot_run_are_told_with_their_lines(
    command: Command, sources: Path, tmp_path: Path
) -> None:
    made = ("compile", f"{sources}:hosted", "-o", tmp_path / "x.vmfb")
    done = command(*made)
    assert (done.code, done.out) == (3, "")
    told = command(*made, "--json").json()
    assert told["error"] == "UnsupportedOpError"
    lines = SOURCES.splitlines()
    where = {
        "aten.median.default": next(i for i, t in enumerate(lines, 1) if "median" in t),
        "aten.linalg_inv_ex.default": next(i for i, t in enumerate(lines, 1) if "inv(" in t),
        "aten._linalg_check_errors.default": next(i for i, t in enumerate(lines, 1) if "inv(" in t),
        "aten.mode.default": next(i for i, t in enumerate(lines, 1) if "mode(" in t),
    }
    assert {o["op"] for o in told["ops"]} == set(where)
    for op in told["ops"]:
        assert f"sources.py:{where[op['op']]} in forward" in op["where"]
        assert op["reason"]
        assert op["code"] == lines[where[op["op"]] - 1].strip()
        assert op["where"] in done.err
    assert [*tmp_path.iterdir()] == []


def test_a_bundle_runs_what_an_artifact_cannot(
    command: Command, sources: Path, tmp_path: Path
) -> None:
    made = ("compile", f"{sources}:hosted", "-o", tmp_path / "x.npub", "--bundle", "--json")
    done = command(*made, "--host-ops", "allow")
    assert done.code == 0, done.err
    assert done.json()["difference"] < 1e-4
    done = command(*made, "--host-ops", "forbid")
    assert done.code == 3
    assert "aten.median.default" in {op["op"] for op in done.json()["ops"]}
    assert "allow the host with --host-ops allow." in done.json()["message"]
    assert "fallback" not in done.json()["message"]


def test_a_branch_is_told_with_the_line_that_was_written(
    command: Command, sources: Path, tmp_path: Path
) -> None:
    done = command("compile", f"{sources}:branches", "-o", tmp_path / "x.vmfb", "--json")
    assert done.code == 3
    assert done.json()["ops"]
    for op in done.json()["ops"]:
        assert "sources.py" in op["where"]
        assert op["code"].startswith("return torch.cond(")


def test_a_size_that_another_input_shares_is_told(
    command: Command, sources: Path, tmp_path: Path
) -> None:
    made = ("compile", f"{sources}:masked", "-o", tmp_path / "x.vmfb", "--dynamic", "ids:1")
    done = command(*made)
    assert done.code == 7
    assert "your code specialized it to be a constant (5)" in done.err
    assert "each must be given: --dynamic ids:1 --dynamic mask:1" in done.err
    assert "draft_export" not in done.err


@pytest.mark.slow
def test_an_op_that_the_compiler_refuses_is_told(
    command: Command, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_IREE_FAULT", "torch-to-linalg:abort:aten.relu.default")
    done = command("compile", f"{sources}:small", "-o", tmp_path / "x.vmfb", "--json")
    assert done.code == 3
    (op,) = done.json()["ops"]
    assert op["op"] == "aten.relu.default"
    assert "the compiler refuses it" in op["reason"]
    assert [*tmp_path.iterdir()] == []


def test_a_compile_error_has_a_code_of_its_own(
    command: Command, sources: Path, tmp_path: Path
) -> None:
    flag = "--flag=--iree-hal-target-backends=nonsense"
    done = command("compile", f"{sources}:small", "-o", tmp_path / "x.vmfb", flag)
    assert done.code == 4
    assert "stage" in done.err
    assert "Traceback" not in done.err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("nowhere.pt2", "there is no file nowhere.pt2"),
        ("nowhere.py:model", "there is no file nowhere.py"),
        ("no.such.module:model", "cannot import no.such.module"),
        ("SOURCES:nosuch", "has no function 'nosuch'"),
        ("SOURCES:nothing", "it is to return (model, example inputs)"),
        ("SOURCES:fails", "KeyError: 'key' (at SOURCES:"),
        ("SOURCES:ends", "SystemExit: usage: model (at SOURCES:"),
        ("SOURCES:control", "torch.export cannot export 'main'"),
        ("model", "is no source: give file.pt2"),
        ("README.mlir", "no stage continues from"),
        ("broken.pt2", "is no exported program that can be read"),
        ("broken.py:model", "SyntaxError"),
        ("broken.linalg.mlir", "broken.linalg.mlir"),
        ("weights.flow.mlir", "its weights are parameters"),
    ],
)
def test_a_bad_source_is_told(
    source: str,
    reason: str,
    command: Command,
    sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("broken.pt2", "broken.py", "README.mlir", "broken.linalg.mlir"):
        Path(name).write_text("this is no such file (")
    Path("weights.flow.mlir").write_text(
        'util.global private @w = #flow.parameter.named<"model"::"w"> : tensor<8xf32>'
    )
    before = {*tmp_path.iterdir()}
    source, reason = (t.replace("SOURCES", str(sources)) for t in (source, reason))
    done = command("compile", source, "-o", "x.vmfb")
    assert done.code == (4 if source.startswith("broken.linalg") else 7), done.err
    assert reason in done.err
    assert "Traceback" not in done.err
    assert {*tmp_path.iterdir()} - {tmp_path / "__pycache__"} == before


BAD_OPTIONS = {
    ("--dynamic", "x"): "--dynamic is input:dim or input:dim=min..max",
    ("--dynamic", "y:0"): "there are the inputs x",
    ("--dynamic", "x:7"): "x has no dimension 7",
    ("--dynamic", f"x:0={'9' * 30}.."): "--dynamic is input:dim or input:dim=min..max",
    ("--cpu", ""): "--cpu is LLVM's name of a CPU",
    ("--dynamic", "x:0=9..2"): "--dynamic x:0=9..2: 9 is more than 2",
    ("--import", "no.such"): "cannot import no.such",
}


def test_a_bad_option_of_a_source_is_told(command: Command, sources: Path, tmp_path: Path) -> None:
    for options, reason in BAD_OPTIONS.items():
        done = command("compile", f"{sources}:small", "-o", tmp_path / "x.vmfb", *options)
        assert done.code == (7 if options[0] == "--import" else 2), options
        assert reason in done.err, options


def test_the_sizes_of_an_exported_program_stay(command: Command, tmp_path: Path) -> None:
    done = command("compile", "net.pt2", "-o", tmp_path / "x.vmfb", "--dynamic", "x:0")
    assert done.code == 2
    assert "net.pt2 is exported already" in done.err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--host-ops", "allow"), "goes with --bundle"),
        (("--stop-after", "nowhere"), "no stage 'nowhere'; there are: aten-to-torch"),
        (("--stop-after", "aten-to-torch", "--verify"), "a stage's product has no --verify"),
        (("--stop-after", "aten-to-torch"), "x.torch.mlir"),
        (("--bundle", "--cpu", "x86-64-v3"), "a bundle has no --cpu"),
        (("b=again", "--params", "nowhere"), "nowhere"),
        (("x.linalg.mlir",), "an IR file is compiled alone: its functions are"),
        (("x.linalg.mlir", "--bundle"), "an IR file is compiled into an artifact, not into"),
        (("-o", "/dev/null/x.vmfb"), "/dev/null/x.vmfb cannot be written"),
    ],
)
def test_a_useless_option_is_refused(
    options: tuple[str, ...], reason: str, command: Command, sources: Path, tmp_path: Path
) -> None:
    done = command("compile", f"{sources}:small", "-o", tmp_path / "x.vmfb", *options)
    assert done.code == 2
    assert reason in done.err


def test_two_entry_points_of_one_name_are_refused(
    command: Command, sources: Path, tmp_path: Path
) -> None:
    both = (f"{sources}:small", f"{sources}:counts")
    done = command("compile", *both, "-o", tmp_path / "x.vmfb")
    assert done.code == 2
    assert "two entry points are called 'main'" in done.err


@pytest.mark.usefixtures("shared_cache")
def test_verify_finds_a_real_difference(
    command: Command, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ("compile", f"{sources}:small", "-o", tmp_path / "x.vmfb", "--verify", "--json")
    assert command(*made).json()["difference"] < 1e-5

    def leaky(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, x * 0.01)

    table = "lowering.offline.decomposition_table"
    own = {torch.ops.aten.relu.default: leaky}
    monkeypatch.setattr(table, lambda keep: {**decomposition_table(keep), **own})
    done = command(*made)
    assert done.code == 8
    assert "main: result 0 is not eager's" in done.json()["message"]


NAN = float("nan")


@pytest.mark.parametrize(
    ("actual", "expected", "reason"),
    [
        (torch.tensor([NAN, 2.0]), torch.tensor([1.0, 2.0]), "result 0 is not eager's"),
        (torch.ones(2).double(), torch.ones(2), "result 0 is not eager's"),
        ([torch.ones(2), 3], [torch.ones(2), 4], "result 1 is 3, and eager's is 4"),
        ([torch.ones(2), 3], [torch.ones(2), 3.0], "result 1 is 3, and eager's is 3.0"),
        ([torch.ones(2)], [torch.ones(2), torch.ones(2)], "its results are"),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}, "its results are"),
    ],
)
def test_verify_sees_all_that_differs(actual: Any, expected: Any, reason: str) -> None:
    with pytest.raises(npu_iree.VerificationError, match=reason):
        compare_results("main", (actual, ()), (expected, ()))
    with pytest.raises(npu_iree.VerificationError, match="argument"):
        compare_results("main", (None, actual), (None, expected))
    same = (defaultdict(int, a=torch.tensor([NAN]), b=NAN), expected)
    assert compare_results("main", (dict(same[0]), expected), same) == 0


def test_a_bundle_is_compared_from_the_states_it_starts_with(
    command: Command, sources: Path, tmp_path: Path
) -> None:
    made = ("compile", "-o", tmp_path / "x.npub", "--bundle", "--json")
    done = command(*made, f"{sources}:counts")
    assert (done.code, done.json()["difference"]) == (0, 0)
    done = command(*made, f"{sources}:narrow")
    assert (done.code, done.json()["error"]) == (7, "SourceError")


def test_functions_of_one_file_share_what_it_makes(sources: Path) -> None:
    one, other = (load_examples(f"{sources}:{name}")["main"] for name in ("shared", "again"))
    assert one.model is other.model


def test_verify_starts_from_the_states_of_the_export(
    command: Command, sources: Path, tmp_path: Path
) -> None:
    made = ("compile", f"{sources}:pair", "-o", tmp_path / "x.vmfb", "--verify", "--json")
    done = command(*made)
    assert done.code == 0, done.out
    assert [*done.json()["entries"]] == ["a", "b"]


# Targets.


def test_for_cuda_with_no_such_device(command: Command, sources: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.vmfb"
    done = command("compile", f"{sources}:small", "-o", path, "--target", "cuda", "--json")
    assert done.code == 0, done.err
    assert done.json()["target"] == "cuda"
    assert done.json()["cpu_features"] == []
    inspected = command("inspect", path, "--json")
    assert (inspected.code, inspected.json()["target"]) == (0, "cuda (driver cuda)")
    told = command("run", path, "--input=x=@rand", "--json")
    assert told.code == 6
    assert "cannot open a device for 'cuda' (driver cuda)" in told.json()["message"]
    told = command("run", path, "--input=x=@rand", "--target", "npu-local")
    assert told.code == 6
    assert "was compiled for target 'cuda' (driver cuda)" in told.err


def test_for_an_older_cpu(command: Command, sources: Path, tmp_path: Path) -> None:
    """Whose registers hold less than a result of a few rows."""
    few_rows = tmp_path / "few.py"
    few_rows.write_text(_FEW_ROWS)
    both = (f"a={sources}:small", f"b={few_rows}:few_rows")
    options = ("-o", tmp_path / "x.vmfb", "--cpu", "x86-64-v3", "--verify", "--json")
    done = command("compile", *both, *options)
    assert done.code == 0, done.out
    assert [*done.json()["entries"]] == ["a", "b"]
    assert "avx2" in done.json()["cpu_features"]
    assert not [f for f in done.json()["cpu_features"] if f.startswith("avx512")]
    assert "--iree-llvmcpu-target-cpu=x86-64-v3" in done.json()["flags"]


def test_a_source_is_not_overwritten(command: Command, tmp_path: Path) -> None:
    source = tmp_path / "few.py"
    source.write_text(_FEW_ROWS)
    done = command("compile", f"{source}:few_rows", "-o", source)
    assert done.code == 2
    assert "is what is to be compiled" in done.err
    assert source.read_text() == _FEW_ROWS


_FEW_ROWS = """
import torch

class Product(torch.nn.Module):
    def forward(self, x, w, v):
        return torch.relu(x @ w) @ v.t()

def few_rows():
    return Product(), (torch.randn(6, 64), torch.randn(64, 256), torch.randn(64, 256))
"""


def test_for_a_cpu_that_is_not_here(command: Command, sources: Path, tmp_path: Path) -> None:
    """No machine has both AMD's FMA4 and Intel's AMX."""
    for cpu, feature in (("graniterapids", "amx-tile"), ("bdver2", "fma4")):
        path = tmp_path / f"{cpu}.vmfb"
        done = command("compile", f"{sources}:small", "-o", path, "--cpu", cpu, "--json")
        assert done.code == 0, done.out
        assert feature in done.json()["cpu_features"]
    told = command("run", path, "--input=x=@rand")
    assert told.code == 6
    assert "was compiled for a CPU with" in told.err
    assert "fma4" in told.err
    assert "npu-iree compile --cpu x86-64-v3" in told.err


def test_for_another_architecture(command: Command, sources: Path, tmp_path: Path) -> None:
    path = tmp_path / "arm.vmfb"
    flag = "--flag=--iree-llvmcpu-target-triple=aarch64-unknown-linux-gnu"
    made = ("compile", f"{sources}:small", "-o", path, "--cpu", "generic", flag, "--json")
    done = command(*made)
    assert done.code == 0, done.out
    told = command("run", path, "--input=x=@rand")
    assert told.code == 6
    assert "arm_64" in told.err


def test_a_target_without_cpu_code_has_no_cpu(
    command: Command, sources: Path, tmp_path: Path
) -> None:
    options = ("--target", "cuda", "--cpu", "x86-64-v3")
    done = command("compile", f"{sources}:small", "-o", tmp_path / "x.vmfb", *options)
    assert done.code == 2
    assert "no target of CPU code" in done.err


def test_an_unknown_target_is_told(
    command: Command, sources: Path, tmp_path: Path, net: Path
) -> None:
    made = ("compile", f"{sources}:small", "-o", tmp_path / "x.vmfb")
    for verb in (made, ("run", net), ("capabilities", "show", "npu-locl")):
        done = command(*verb, *(("--target", "npu-locl") if verb[0] != "capabilities" else ()))
        assert done.code == 6
        assert "Did you mean 'npu-local'?" in done.err
    with pytest.raises(TargetError):
        npu_iree.load(net, "npu-locl")
    for text in ("ops = 3", ""):
        (tmp_path / "table.toml").write_text(text)
        assert command("capabilities", "show", tmp_path / "table.toml").code == 6


# Running.


BAD_INPUTS: list[tuple[tuple[str, ...], int, str]] = [
    ((), 9, "missing: --input x=..."),
    (("--input", "y=@rand"), 9, "no input y; there are x"),
    (("--input", "x"), 2, "--input is name=value"),
    (("--input", "x=nowhere.npy"), 9, "cannot read input x from nowhere.npy"),
    (("--input", "x=wrong.npy"), 9, "x is f64, and was compiled for f32"),
    (("--input", "x=objects.npy"), 9, "cannot read input x"),
    (("--input", "x=empty.npy"), 9, "cannot read input x from empty.npy"),
    (("--input", "x=huge.npy"), 9, "cannot read input x from huge.npy: Unable to allocate"),
    (("--input", "x=3"), 9, "f32): give FILE.npy, FILE.safetensors or @rand, not '3'"),
    (("--input", "x=several.npz"), 9, "cannot read input x from several.npz"),
    (("--input", f"x={'n' * 300}.npy"), 9, "File name too long"),
    (("--input", "x=@rand", "--params", f"{'n' * 300}.irpa"), 5, "File name too long"),
    (("--input", "x=@rand", "--size", "s=1"), 2, "no size s; there are: NAME"),
    (("--input", "x=@rand", "--size", "NAME=99"), 9, "dimension 0 of x is 99"),
    (("--input", "x=@rand", "--size", "NAME=-1"), 2, "NAME is a size"),
    (("--input", "x=@rand", "--size", f"NAME={'9' * 15}"), 9, "cannot be drawn: "),
    (("--input", "x=@rand", "--size", f"NAME={'9' * 5000}"), 2, "NAME is a size"),
    (("--input", "x=@rand", "--size", f"x:{'9' * 5000}=4"), 2, "no size x:9999"),
    (("--input", "x=@rand", "--size", "x:0=99"), 9, "dimension 0 of x is 99"),
    (("--input", "x=@rand", "--size", "x:9=1"), 2, "no size x:9; there are: NAME"),
    (("--input", "x=@rand", "--entry", "other"), 9, "no entry point 'other'; there are: main"),
    (("--input", "x=@rand", "--params", "nowhere.irpa"), 5, "nowhere.irpa"),
    (("--input", "x=@rand", "--output", "wrong.npy/x"), 2, "cannot be written"),
]


def test_bad_inputs_are_told(
    command: Command, net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("wrong.npy", np.ones((2, 4)))
    np.savez("several.npz", a=np.ones(1), b=np.ones(2))
    Path("empty.npy").touch()
    with open("huge.npy", "wb") as file:
        header = {"shape": (10**13,), "fortran_order": False, "descr": "<f4"}
        np.lib.format.write_array_header_1_0(file, header)
    np.save("objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (symbol,) = read_manifest(net).entries["main"].symbols
    for options, code, reason in BAD_INPUTS:
        given = [option.replace("NAME", symbol) for option in options]
        done = command("run", net, *given)
        assert (done.code, done.out) == (code, ""), f"{given}: {done.err}"
        assert reason.replace("NAME", symbol) in done.err, given
        assert "Traceback" not in done.err, given
        told = command("run", net, *given, "--json")
        assert (told.code, told.err) == (code, ""), given
        assert reason.replace("NAME", symbol) in told.json()["message"], given

    def say_nothing(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "randn", say_nothing)
    done = command("run", net, "--input", "x=@rand", "--size", f"{symbol}=3")
    assert (done.code, done.out) == (9, "")
    assert "cannot be drawn: MemoryError" in done.err


def test_what_is_no_artifact_is_told(command: Command, tmp_path: Path) -> None:
    (tmp_path / "x.vmfb").write_text("nothing")
    for name in ("x.vmfb", "nowhere.vmfb"):
        for verb in ("run", "inspect", "bench"):
            done = command(verb, tmp_path / name)
            assert (done.code, done.out) == (5, "")
            assert name in done.err
    assert "it is no artifact of `npu-iree compile`" in command("run", tmp_path / "x.vmfb").err


def test_nothing_is_left_of_an_artifact_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.write_text("a file")
    model = SmallModel(Net(), (torch.ones(2, 4),))
    with pytest.raises(npu_iree.ArtifactError, match="cannot be written"):
        compiled({"main": model}, folder / "x.vmfb")
    (tmp_path / "taken.vmfb").mkdir()
    for path in (tmp_path / "taken.vmfb", Path()):
        with pytest.raises(npu_iree.ArtifactError, match="cannot be written"):
            compiled({"main": model}, path)
    assert {p.name for p in tmp_path.iterdir()} == {"folder", "taken.vmfb"}


def test_what_cannot_be_written_is_not_compiled_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "capture_exports", None)
    model = SmallModel(Net(), (torch.ones(2, 4),))
    (tmp_path / "taken").touch()
    (loop := tmp_path / "loop.vmfb").symlink_to("loop.vmfb")
    for path in (Path("/proc/x.vmfb"), tmp_path / "taken" / "new" / "x.vmfb", loop):
        with pytest.raises(npu_iree.ArtifactError, match=f"{path}.* cannot be written"):
            compiled({"main": model}, path)


@pytest.mark.usefixtures("shared_cache")
def test_a_link_stays_and_leads_to_what_is_written(tmp_path: Path) -> None:
    model, latest = SmallModel(Net(), (torch.ones(2, 4),)), tmp_path / "latest.vmfb"
    latest.symlink_to("kept/v1.vmfb")
    compiled({"main": model}, latest)
    assert latest.is_symlink()
    assert {p.name for p in (tmp_path / "kept").iterdir()} == {"v1.vmfb", "v1.irpa"}
    (tmp_path / "v1.irpa").write_bytes(b"another version's")
    npu_iree.load(latest)
    (tmp_path / "kept" / "v1.irpa").replace(tmp_path / "v1.irpa")
    npu_iree.load(latest)
    (report := tmp_path / "report").symlink_to("reports/1")
    write_atomically(report, b"a report")
    assert report.is_symlink()
    assert report.read_bytes() == b"a report"


def test_what_is_no_file_is_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        build.write_files(pipe, b"an artifact", "", {})
        assert reader.read() == b"an artifact"
    monkeypatch.setattr(build, "compile_exports", None)
    with pytest.raises(npu_iree.ArtifactError, match="no parameters beside it: embed them"):
        compiled({"main": SmallModel(Net(), (torch.ones(2, 4),))}, pipe)
    os.mkfifo(tmp_path / "pipe.irpa")
    with pytest.raises(npu_iree.ArtifactError, match="written to a file, and it is none"):
        npu_iree.save_parameters({}, tmp_path / "pipe.irpa")
    assert all(p.is_fifo() for p in tmp_path.iterdir())


def test_what_is_written_to_a_descriptor_stands_between_what_else_is_written_there(
    tmp_path: Path,
) -> None:
    """As to `/dev/stdout`, which leads there."""
    path, out = tmp_path / "out.txt", tmp_path / "out"
    with path.open("wb", buffering=0) as file:
        out.symlink_to(f"/proc/self/fd/{file.fileno()}")
        file.write(b"before ")
        write_atomically(out, b"between ")
        file.write(b"after")
    assert path.read_bytes() == b"before between after"
    assert {*tmp_path.iterdir()} == {path, out}


@pytest.mark.usefixtures("shared_cache")
def test_parameters_of_others_are_not_written_over(tmp_path: Path) -> None:
    """Models are often kept as `model.safetensors`."""
    model, path = SmallModel(Net(), (torch.ones(2, 4),)), tmp_path / "model.vmfb"
    theirs = tmp_path / "model.safetensors"
    npu_iree.save_parameters({**Net().state_dict(), "scale": torch.ones(3)}, theirs)
    before = theirs.read_bytes()
    options = BuildOptions(params="safetensors")
    with pytest.raises(npu_iree.ArtifactError, match="was not written with it"):
        compiled({"main": model}, path, options)
    assert not path.exists()
    assert theirs.read_bytes() == before
    theirs.unlink()
    compiled({"main": model}, path, options)
    with torch.no_grad():
        model.model.scale.add_(1)
    compiled({"main": model}, path, options)  # its own may go
    path.unlink()
    compiled({"main": model}, path, options)  # and what is the same
    theirs.write_bytes(before)  # which somebody has tuned
    with pytest.raises(npu_iree.ArtifactError, match="was not written with it"):
        compiled({"main": model}, path, options)
    assert theirs.read_bytes() == before


def test_what_is_no_exported_program_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "model.vmfb", torch.nn.Linear(2, 2)
    with pytest.raises(ExportError, match=r"'main' is of Linear, not a torch\.export"):
        write_artifact(model, path)  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="'f' is of Linear"):
        write_artifact({"f": model}, path)  # type: ignore[dict-item]
    with pytest.raises(npu_iree.ArtifactError, match="'w' is no tensor but of int"):
        save_parameters({"w": 3}, path.with_suffix(".irpa"))  # type: ignore[dict-item]
    assert not [*tmp_path.iterdir()]


def test_gradients_are_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="computes nothing"):
        compiled({"main": SmallModel(torch.nn.Identity(), (torch.ones(2),))}, tmp_path / "x.vmfb")


class Keyed(torch.nn.Module):
    def __init__(self, key: object) -> None:
        super().__init__()
        self.key = key

    def forward(self, x: torch.Tensor) -> dict[object, torch.Tensor]:
        return {self.key: x + 1}


class Unsigned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("words", torch.zeros(4, dtype=torch.uint32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class CountsElements(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x + 1, x.nonzero().shape[0]


class Sine(torch.nn.Module):
    dynamic = ({0: torch.export.Dim.DYNAMIC},)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch._sym_sin(x.shape[0]) > 0 else x + 1


@pytest.mark.parametrize(
    ("model", "error", "reason"),
    [
        (Keyed(None), ExportError, "a dict with the key None"),
        (Keyed((1, 2)), ExportError, r"a dict with the key \(1, 2\)"),
        (Keyed(torch.float32), ExportError, "a dict with the key torch.float32"),
        (Unsigned(), ExportError, "words is torch.uint32, which no artifact holds"),
        (CountsElements(), npu_iree.UnsupportedOpError, "nonzero"),
        (Sine(), ExportError, r"OpaqueUnaryFn_sin.* > 0.* \(at .*test_failures.py:.* in forward\)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_no_artifact_holds_is_told_before_anything_is_compiled(
    model: torch.nn.Module,
    error: type[Exception],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lowering.pipeline.run_stage", None)
    small = SmallModel(model, (torch.ones(2),), dynamic=getattr(model, "dynamic", None))
    with pytest.raises(error, match=reason):
        compiled({"main": small}, tmp_path / "x.vmfb")
    with pytest.raises(npu_iree.OptionError, match="params is one of irpa"):
        compiled({}, tmp_path / "x.vmfb", BuildOptions(params="split"))  # type: ignore[arg-type]


class Writes(torch.nn.Module):
    def __init__(self, cache: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("cache", cache)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.add_(x)
        return x * 2


class Reads(Writes):
    def __init__(self, cache: torch.Tensor) -> None:
        super().__init__(cache[0])
        self.register_buffer("whole", cache)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole + x


def test_buffers_that_are_parts_of_one_tensor_are_refused(tmp_path: Path) -> None:
    cache, args = torch.zeros(2, 3), (torch.ones(3),)
    writes, both = Writes(cache[0]), Reads(cache)
    models = {"write": SmallModel(writes, args), "read": SmallModel(both, args)}
    with pytest.raises(ExportError, match="writes to buffer cache, which shares memory with whole"):
        compiled(models, tmp_path / "x.vmfb")
    both.forward = lambda x: Writes.forward(both, x) + both.whole  # type: ignore[method-assign]
    with pytest.raises(ExportError, match="PyTorch cannot decompose it"):
        compiled({"both": SmallModel(both, args)}, tmp_path / "x.vmfb")


def test_entry_points_with_other_weights_of_one_name_are_refused(tmp_path: Path) -> None:
    other = Net()
    with torch.no_grad():
        other.scale.add_(1)
    programs = {
        name: SmallModel(model, (torch.ones(2, 4),)).export()
        for name, model in (("a", Net()), ("b", other))
    }
    with pytest.raises(ExportError, match="parameter scale is another tensor in entry point 'b'"):
        write_artifact(programs, tmp_path / "x.vmfb", BuildOptions())
    assert json.dumps([p.name for p in tmp_path.iterdir()]) == "[]"


class Around(torch.nn.Module):
    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) * self.scale


def test_a_name_is_one_tensor_in_all_entry_points(tmp_path: Path) -> None:
    """Where one calls `layers.0.scale` what the other calls `scale`, and has a `scale` itself."""
    inner, args = Net(), (torch.ones(2, 4),)
    models = {"a": SmallModel(inner, args), "b": SmallModel(Around(inner), args)}
    with pytest.raises(ExportError, match="scale is another tensor here"):
        compiled(models, tmp_path / "x.vmfb")

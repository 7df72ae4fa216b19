"""BERT, a ResNet and a Llama: exported, compiled by the command line, run without a compiler."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import npu_iree
from command import end, start
from lowering.vmfb import read_manifest
from models.exported import MODELS, MOST, tokens
from npu_iree.offline.parameters import Parameters
from npu_iree.tolerances import largest_difference
from once import made_once
from runtime_env import ROOT, runtime_only_environment

LIMIT = 1e-4  # of the largest value
PASTS = (1, 8, MOST - 1)
LENGTHS = (1, 8, MOST)


@dataclass(frozen=True)
class Case:
    """A call of an entry point.

    Attributes:
        model: name of the artifact.
        entry: name of the entry point.
        inputs: by their names.
        expected: the leaves of eager's result.
    """

    model: str
    entry: str
    inputs: dict[str, torch.Tensor]
    expected: list[torch.Tensor]

    @property
    def name(self) -> str:
        sizes = [t.shape[-1] if t.dim() == 2 else t.shape[2] for t in self.inputs.values()]
        return f"{self.model}-{self.entry}-{max(sizes)}"


@torch.no_grad()
def _cases() -> list[Case]:
    cases = []
    for name in ("bert", "resnet"):
        model, inputs = MODELS[name]()
        cases.append(Case(name, "main", inputs, list(model(**inputs).values())))
    pairs = MODELS["llama"]()
    prefill, decode = pairs["prefill"][0], pairs["decode"][0]
    for length in LENGTHS:
        prompt = {"input_ids": tokens(length)}
        cases.append(Case("llama", "prefill", prompt, list(prefill(**prompt))))
    names = ("key0", "value0", "key1", "value1")
    for past in PASTS:
        caches = dict(zip(names, prefill(tokens(past))[1:], strict=True))
        token = {"token": torch.tensor([[past]]), **caches}
        cases.append(Case("llama", "decode", token, list(decode(**token))))
    return cases


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {case.name: case for case in _cases()}


def assert_eager(actual: Sequence[torch.Tensor], case: Case) -> None:
    assert len(actual) == len(case.expected), case.name
    for i, (one, other) in enumerate(zip(actual, case.expected, strict=True)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), (case.name, i)
        assert largest_difference(one, other) < LIMIT, (case.name, i)


@pytest.fixture(scope="module")
def loaded(
    zoo: Path,
    cases: dict[str, Case],
    runtime_only_python: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, Any]]:
    """All calls in one process that has no compiler: the folder of results, what it says."""

    def make(folder: Path) -> None:
        jobs = []
        for name, case in cases.items():
            save_file({n: t.contiguous() for n, t in case.inputs.items()}, folder / f"{name}.in")
            jobs.append(
                {
                    "artifact": str(zoo / f"{case.model}.vmfb"),
                    "entry": case.entry,
                    "inputs": str(folder / f"{name}.in"),
                    "outputs": str(folder / f"{name}.out"),
                }
            )
        (folder / "jobs.json").write_text(json.dumps(jobs))
        script = ROOT / "tests" / "programs" / "artifact.py"
        done = subprocess.run(
            [str(runtime_only_python), str(script), str(folder / "jobs.json")],
            capture_output=True,
            text=True,
            env=runtime_only_environment(),
        )
        assert done.returncode == 0, done.stderr
        (folder / "said.json").write_text(done.stdout)

    folder = made_once(tmp_path_factory, "loaded", make)
    return folder, json.loads((folder / "said.json").read_text())


@pytest.mark.slow
def test_load_gives_eagers_numbers_without_a_compiler(
    loaded: tuple[Path, dict[str, Any]], cases: dict[str, Case]
) -> None:
    folder, said = loaded
    assert said["compilers"] == []
    assert len(cases) == 2 + len(LENGTHS) + len(PASTS)
    for name, case in cases.items():
        found = load_file(folder / f"{name}.out")
        assert_eager([found[str(i)] for i in range(len(found))], case)


def test_a_result_of_a_type_that_is_not_there_is_a_dict(
    loaded: tuple[Path, dict[str, Any]], cases: dict[str, Case]
) -> None:
    kinds = dict(zip(cases, loaded[1]["kinds"], strict=True))
    assert kinds["bert-main-16"] == ["dict", ["last_hidden_state", "pooler_output"]]
    assert kinds["resnet-main-64"] == ["dict", ["logits"]]
    assert kinds["llama-prefill-8"] == ["tuple", None]


@pytest.fixture(scope="module")
def arrays(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of .npy files: `case.input.npy`."""
    folder = tmp_path_factory.mktemp("arrays")
    for name, case in cases.items():
        for key, tensor in case.inputs.items():
            np.save(folder / f"{name}.{key}.npy", tensor.numpy())
    return folder


def test_run_gives_eagers_numbers_without_a_compiler(
    zoo: Path, cases: dict[str, Case], arrays: Path, runtime_only_python: Path, tmp_path: Path
) -> None:
    processes = {}
    for name in ("resnet-main-64", f"llama-decode-{MOST - 1}"):
        case = cases[name]
        inputs = [f"--input={key}={arrays / f'{name}.{key}.npy'}" for key in case.inputs]
        options = ("--entry", case.entry, "--output", tmp_path / f"{name}.npz", "--json")
        artifact = zoo / f"{case.model}.vmfb"
        processes[name] = start("run", artifact, *inputs, *options, python=runtime_only_python)
    for name, process in processes.items():
        done = end(process)
        assert (done.code, done.err) == (0, "")
        assert len(done.json()["outputs"]) == len(cases[name].expected)
        found = np.load(tmp_path / f"{name}.npz")
        results = [torch.from_numpy(found[f"output{i}"]) for i in range(len(found))]
        assert_eager(results, cases[name])


@pytest.mark.parametrize("suffix", ["irpa", "safetensors"])
@pytest.mark.parametrize("name", ["bert-main-16", "llama-prefill-8", "llama-decode-8"])
def test_stock_iree_runs_the_same_files(
    name: str, suffix: str, zoo: Path, cases: dict[str, Case], arrays: Path, tmp_path: Path
) -> None:
    case = cases[name]
    parameters = zoo / f"{case.model}.irpa"
    manifest = read_manifest(zoo / f"{case.model}.vmfb")
    assert manifest.entries[case.entry].function.checks
    if suffix == "safetensors":
        tensors = Parameters.from_file(parameters, manifest).tensors
        parameters = tmp_path / "parameters.safetensors"
        npu_iree.save_parameters(tensors, parameters)
    *outputs, failed = [tmp_path / f"{i}.npy" for i in range(len(case.expected) + 1)]
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "iree-run-module"),
            "--device=local-task",
            f"--module={zoo / f'{case.model}.vmfb'}",
            f"--function={case.entry}",
            f"--parameters=model={parameters}",
            *(f"--input=@{arrays / f'{name}.{key}.npy'}" for key in case.inputs),
            *(f"--output=@{output}" for output in (*outputs, failed)),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert_eager([torch.from_numpy(np.load(output)) for output in outputs], case)
    assert np.load(failed) == 0


def test_decode_takes_handles_of_prefill_without_a_wait(zoo: Path, cases: dict[str, Case]) -> None:
    program = npu_iree.load(zoo / "llama.vmfb")
    (prompt,) = cases["llama-prefill-8"].inputs.values()
    token = cases["llama-decode-8"].inputs["token"]
    with npu_iree.record_transfers() as ledger, npu_iree.copy_budget(d2h=0, waits=0):
        _, *caches = program.prefill.submit(prompt)
        for _ in range(3):
            logits, *caches = program.decode.submit(token, *caches)
    kinds = [entry.kind for entry in ledger.entries]
    assert set(kinds) == {"h2d"}
    with torch.no_grad():
        pairs = MODELS["llama"]()
        _, *expected = pairs["prefill"][0](prompt)
        for _ in range(3):
            wanted, *expected = pairs["decode"][0](token, *expected)
    case = Case("llama", "decode", {"token": token}, [wanted, *expected])
    assert_eager([logits.to_host(), *(c.to_host() for c in caches)], case)


def test_the_manifest_is_plain_json_in_a_zip(zoo: Path) -> None:
    with zipfile.ZipFile(zoo / "llama.vmfb") as file:
        manifest = json.loads(file.read("npu_iree.json"))
    assert manifest["format"] == 1
    assert [*manifest["entries"]] == ["prefill", "decode"]
    for call in manifest["entries"].values():  # for tools that know no manifest: the model's order
        for kind, sources in (("argument", call["takes"]), ("result", call["outputs"])):
            assert [(s["kind"], s["index"]) for s in sources] == [
                (kind, i) for i in range(len(sources))
            ]
    source = hashlib.sha256((zoo / "llama-decode.pt2").read_bytes()).hexdigest()
    assert manifest["source"]["sha256 of llama-decode.pt2"] == source
    module = (zoo / "llama.vmfb").read_bytes()[: manifest["module_bytes"]]
    assert hashlib.sha256(module).hexdigest() == manifest["module_sha256"]
    # Prefill and decode share their weights: what one has, the other has.
    assert len({p["name"] for p in manifest["parameters"]}) == len(manifest["parameters"])
    assert (zoo / "llama.irpa").stat().st_size < 1.2 * sum(
        4 * int(np.prod(p["shape"])) for p in manifest["parameters"]
    )


@pytest.mark.parametrize(
    ("entry", "inputs", "reason"),
    [
        (
            "prefill",
            {"input_ids": tokens(MOST + 1)},
            "dimension 1 of input_ids is 49, and",
        ),
        ("prefill", {"input_ids": tokens(3).int()}, "input_ids is i32, and was compiled for i64"),
        ("prefill", {"input_ids": tokens(3)[0]}, "input_ids has 1 dimensions, not 2"),
        ("prefill", {"ids": tokens(3)}, "missing input_ids; no argument ids"),
        ("decode", {"token": tokens(1)}, "missing key0, value0, key1, value1"),
    ],
)
def test_wrong_inputs_are_refused_before_anything_runs(
    entry: str, inputs: dict[str, torch.Tensor], reason: str, zoo: Path
) -> None:
    program = npu_iree.load(zoo / "llama.vmfb")
    with npu_iree.record_transfers() as ledger, pytest.raises(npu_iree.ArgumentError, match=reason):
        program[entry](**inputs)
    assert ledger.entries == []

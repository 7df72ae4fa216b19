"""Another version set than the verified one is one clear error."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import npu_iree
from npu_iree import versions


def test_the_installed_set_is_the_verified_one() -> None:
    versions.check_versions(*versions.VERIFIED)


def test_another_version_is_named_with_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(versions.VERIFIED, "torch-mlir", "1.2.3")
    versions.check_versions.cache_clear()
    try:
        with pytest.raises(npu_iree.VersionError) as caught:
            versions.check_versions("torch", "torch-mlir")
    finally:
        versions.check_versions.cache_clear()
    text = str(caught.value)
    assert "torch-mlir: verified 1.2.3, found 20261001" in text
    assert "pip install torch==2.13.* torch-mlir==1.2.3" in text


def test_pyproject_pins_the_verified_set() -> None:
    root = Path(__file__).parents[2]
    dynamic = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]
    files = dynamic["dependencies"]["file"]
    lines = [line for file in files for line in (root / file).read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert {name: pin.removesuffix(".*") for name, pin in pins.items()} == versions.VERIFIED


def test_a_machine_that_only_runs_gets_no_compiler() -> None:
    text = (Path(npu_iree.__file__).parent / "requirements" / "runtime.txt").read_text()
    assert "iree-base-runtime" in text
    assert not [name for name in ("torch-mlir", "iree-base-compiler") if name in text]

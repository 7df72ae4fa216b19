"""Targets of other packages: found, checked, and no trouble to the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowering.target import Candidate
from npu_iree.device import Device
from npu_iree.errors import TargetError
from npu_iree.targets import (
    ABI_FLAGS,
    ENTRY_POINT_GROUP,
    NPU_LOCAL,
    NPU_VIRTUAL,
    Target,
    find_target,
    package_of,
    targets,
)

OURS = {"npu-local", "npu-virtual", "cuda"}
vendor = replace(NPU_VIRTUAL, compile=replace(NPU_VIRTUAL.compile, name="vendor"))
twin = replace(vendor, alignment_bytes=128)
other = replace(NPU_VIRTUAL, compile=replace(NPU_VIRTUAL.compile, name="other"))
taken = replace(NPU_VIRTUAL, alignment_bytes=128)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let packages offer targets of which most are none."""
    (tmp_path / "package_that_exits.py").write_text("raise SystemExit('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    entries = [
        metadata.EntryPoint(name, value, ENTRY_POINT_GROUP)
        for name, value in {
            "vendor": f"{__name__}:vendor",
            "gone": "no_such_package:TARGET",
            "exits": "package_that_exits:TARGET",
            "number": f"{__name__}:OURS",
            "npu-twice": f"{__name__}:taken",
            "twin": f"{__name__}:twin",
            "named": f"{__name__}:other",
            "npu-virtual": f"{__name__}:taken",
        }.items()
    ]
    entries.append(
        metadata.EntryPoint("npu-virtual", "npu_iree.targets:NPU_VIRTUAL", ENTRY_POINT_GROUP)
    )
    module = import_module("npu_iree.targets")
    monkeypatch.setattr(module.metadata, "entry_points", lambda **_: entries)
    module._installed.cache_clear()
    yield
    module._installed.cache_clear()


@pytest.mark.usefixtures("installed")
def test_packages_that_fail_are_told_of_and_disable_no_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert set(targets()) == {*OURS, "vendor", "other"}
    assert find_target("npu-virtual") is NPU_VIRTUAL
    assert find_target("vendor") is vendor
    assert len(caplog.records) == 7
    targets()
    assert len(caplog.records) == 7, "once"
    assert caplog.text.count("target npu-virtual (") == 1, "of another package, and not of ours"
    for name, reason in (
        ("gone", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'"),
        ("exits", "cannot be loaded: SystemExit: no licence"),
        ("number", "is no npu_iree.Target but set"),
        ("named", "the target of this entry point is named 'other'"),
        ("npu-twice", "npu-virtual is built in"),
        ("twin", "another package defines a target 'vendor', too"),
    ):
        assert f"target {name} (" in caplog.text
        assert reason in caplog.text
        with pytest.raises(TargetError, match=f"target '{name}': .*{reason.split(' ')[0]}"):
            find_target(name)


def test_the_package_of_a_target_is_told_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    dist = SimpleNamespace(name="vendors-npu", version="1.2")
    entries = {"vendor": [SimpleNamespace(dist=dist)]}
    module = import_module("npu_iree.targets")
    monkeypatch.setattr(
        module.metadata, "entry_points", lambda *, group, name: entries.get(name, [])
    )
    assert package_of("vendor") == "vendors-npu 1.2"
    assert package_of("npu-local") == ""


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("memory", "shared", "memory is one of unified, discrete, not 'shared'"),
        ("driver", "", "driver is the URI of an IREE device"),
        ("alignment_bytes", 48, "alignment_bytes is a power of two, not 48"),
        ("max_in_flight", 0, "are above 0"),
    ],
)
def test_a_target_that_cannot_be_is_refused(field: str, value: Any, reason: str) -> None:
    values = {"compile": NPU_LOCAL.compile, "driver": "local-task", "memory": "unified"}
    with pytest.raises(TargetError, match=f"target 'npu-local': .*{reason}"):
        Target(**{**values, field: value})


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("rewrites", ("brodcasts",), "'brodcasts' is a rewrite; there are: .*broadcasts"),
        ("flag_sets", ("--one", "--two"), "flag_sets are tuples of flags, .*not .'--one', '--two'"),
        ("flag_sets", (), "flag_sets has a set of flags"),
        (
            "flag_sets",
            (ABI_FLAGS, ABI_FLAGS[:1]),
            f"each set of flag_sets has .*, not .'{ABI_FLAGS[0]}',.$",
        ),
        (
            "flag_sets",
            ((*ABI_FLAGS, "--iree-execution-model=async-internal"),),
            "each set of flag_sets has .*, and no other value for them, not .*async-internal'",
        ),
        (
            "candidates",
            (*NPU_LOCAL.compile.candidates, Candidate(name="short", flags=ABI_FLAGS[1:])),
            f"each of candidates has .*, not .'{ABI_FLAGS[1]}',.$",
        ),
        ("candidates", (), "'.*' is a candidate of its choices; there are: none"),
    ],
)
def test_a_target_names_what_there_is(field: str, value: Any, reason: str) -> None:
    compile_target = replace(NPU_LOCAL.compile, **{field: value})
    with pytest.raises(TargetError, match=f"target 'npu-local': {reason}"):
        Target(compile=compile_target, driver="local-task", memory="unified")


def test_a_driver_that_there_is_not_is_told_with_those_that_there_are() -> None:
    wrong = replace(vendor, driver="local-taks://0")
    with pytest.raises(TargetError, match=r"no driver 'local-taks'. Did you mean 'local-task'\?"):
        Device(wrong)

"""What code needs of a CPU, and what this machine lacks of it."""

from __future__ import annotations

import pytest

from lowering import cpu
from lowering.cpu import compiling_for, known_to_have, missing_features, required_features

FLOW = """
#one = #hal.executable.target<"llvm-cpu", "embedded-elf-{arch}", {{cpu = "x",
  cpu_features = "{features}", data_layout = "e"}}>
"""


def test_only_what_code_may_use_is_required() -> None:
    text = FLOW.format(
        arch="x86_64", features="+avx2,+fma,-avx512f,+avx10.1,+cx16,+prfchw,+sse4.1,+64bit"
    )
    assert required_features(text) == ("avx2", "fma", "sse4.1", "x86_64")
    arm = FLOW.format(arch="arm_64", features="+neon,+sve,+dotprod,+crc")
    assert required_features(arm) == ("arm_64", "dotprod", "sve")
    assert required_features('#hal.executable.target<"cuda", "cuda-nvptx-fb">') == ()


def test_what_a_virtual_machine_hides_of_its_cpu_is_not_required() -> None:
    """LLVM names what a CPU of the kind has, then what this one has; the last word counts."""
    text = FLOW.format(arch="x86_64", features="+amx-tile,+avx2,+fma,-amx-tile,+avx2,-fma,+fma")
    assert required_features(text) == ("avx2", "fma", "x86_64")


@pytest.mark.parametrize(
    ("here", "required", "missing"),
    [
        ({"x86_64", "avx2", "pni", "sse41", "shani"}, ("avx2", "sha", "sse3", "sse4.1"), []),
        ({"x86_64", "avx2"}, ("avx2", "avx512f", "x86_64"), ["avx512f"]),
        ({"x86_64", "avx2"}, ("arm_64",), ["arm_64"]),
        ({"aarch64", "aes"}, ("aes", "arm_64"), []),
        ({"aarch64", "asimddp"}, ("arm_64", "dotprod", "sve2-aes"), ["sve2-aes"]),
        (set(), ("avx512f", "x86_64"), []),  # where it cannot be known
    ],
)
def test_what_is_missing_is_named(
    here: set[str], required: tuple[str, ...], missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_features_here", lambda: frozenset(map(cpu._plain, here)))
    assert missing_features(required) == missing


@pytest.mark.parametrize(
    ("flags", "has_vectors", "has_matrix_unit"),
    [
        (("--iree-llvmcpu-target-cpu=host",), True, True),
        (("--iree-llvmcpu-target-cpu=x86-64-v3",), True, False),
        (("--iree-llvmcpu-target-cpu=x86-64",), False, False),
        (("--iree-hal-target-backends=cuda",), False, False),
    ],
)
def test_what_is_compiled_for_another_cpu_does_not_depend_on_this_one(
    flags: tuple[str, ...],
    has_vectors: bool,
    has_matrix_unit: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = {"avx2", "fma", "amxtile"}
    monkeypatch.setattr(cpu, "_features_here", lambda: frozenset(here))
    with compiling_for(flags):
        assert known_to_have(("avx2", "fma")) == has_vectors
        assert known_to_have(("amx-tile",)) == has_matrix_unit

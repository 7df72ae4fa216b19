"""What a program contains, and which settings a target chooses by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lowering.target import Candidate, Choice, CompileTarget
from lowering.traits import traits_of
from npu_iree.targets import NPU_LOCAL, NPU_VIRTUAL

conv = torch.nn.functional.conv2d
IMAGE, ROW, ROWS = torch.randn(1, 8, 9, 9), torch.randn(1, 16), torch.randn(64, 16)
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], set[str]]] = {
    "nothing": (torch.relu, (ROW,), set()),
    "conv": (conv, (IMAGE, torch.randn(4, 8, 3, 3)), {"convolution", "float32"}),
    "depthwise": (
        lambda x, w: conv(x, w, groups=8),
        (IMAGE, torch.randn(8, 1, 3, 3)),
        {"convolution", "depthwise", "float32"},
    ),
    "rows": (torch.mm, (ROWS, torch.randn(16, 8)), {"matmul", "float32"}),
    "bfloat16": (torch.mm, (ROWS.bfloat16(), ROWS.T.bfloat16()), {"matmul"}),
    "both": (
        lambda x, y: (x @ y, x.bfloat16() @ y.bfloat16()),
        (ROWS, ROWS.T),
        {"matmul"},
    ),
    "row": (torch.mm, (ROW, torch.randn(16, 8)), {"matmul", "few-rows", "float32"}),
    "bias": (
        torch.addmm,
        (torch.randn(8), ROW, torch.randn(16, 8)),
        {"matmul", "few-rows", "float32"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_traits_of_a_graph(name: str) -> None:
    function, args, expected = CASES[name]
    graph = make_fx(function, tracing_mode="fake")(*args)
    assert traits_of([graph]) == expected


def test_the_first_choice_that_fits_comes_before_the_flag_sets() -> None:
    target = CompileTarget(
        name="x",
        flag_sets=(("--a",), ("--b",)),
        candidates=(Candidate(name="c", flags=("--c",)), Candidate(name="b", flags=("--b",))),
        choices=(
            Choice(traits=frozenset({"matmul", "few-rows"}), candidates=("c", "b")),
            Choice(traits=frozenset({"matmul"}), candidates=("b",)),
        ),
    )
    assert target.flag_sets_for({"matmul", "few-rows"}) == (("--c",), ("--b",), ("--a",))
    assert target.flag_sets_for({"matmul"}, ("--u",)) == (("--b", "--u"), ("--a", "--u"))
    assert target.flag_sets_for() == (("--a",), ("--b",))
    assert target.replacing("--b", "--z").flag_sets_for({"matmul"}) == (("--z",), ("--a",))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_convolutions_have_channels_last_whatever_their_sizes(mode: str) -> None:
    flags = {c.name: c.flags for c in NPU_LOCAL.compile.candidates}
    graph = make_fx(conv, tracing_mode=mode)(IMAGE, torch.randn(4, 8, 3, 3))
    chosen = NPU_LOCAL.compile.flag_sets_for(traits_of([graph]))[0]
    assert chosen == flags["channels-last-packed"]


@pytest.mark.parametrize("target", [NPU_LOCAL, NPU_VIRTUAL], ids=lambda t: t.name)
def test_choices_name_candidates(target: Any) -> None:
    names = {candidate.name for candidate in target.compile.candidates}
    assert {name for choice in target.compile.choices for name in choice.candidates} <= names

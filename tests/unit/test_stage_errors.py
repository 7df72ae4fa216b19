"""What a stage's error says: the compiler's words, or which error of ours it is, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowering import service
from lowering.errors import FlagError, StageError, first_line, said, shortened


def test_an_error_of_ours_tells_its_type_and_place() -> None:
    with pytest.raises(KeyError) as caught:
        {}["d0"]
    assert said(caught.value).startswith(f"KeyError: 'd0' (at {Path(__file__)}:")


def test_a_compilers_error_is_in_its_own_words() -> None:
    assert said(RuntimeError("failed to legalize")) == "failed to legalize"
    assert said(RuntimeError()) == "RuntimeError"


def test_the_first_line_of_an_error_says_something() -> None:
    assert first_line(RuntimeError("\n  one  \ntwo")) == "one"
    assert first_line(MemoryError()) == "MemoryError"
    assert first_line("") == ""


def test_of_many_lines_it_is_told_how_many_more_there_are() -> None:
    assert shortened(["a", "b"], 2) == ["a", "b"]
    assert shortened(["a", "b", "c"], 1, "{} more") == ["a", "2 more"]


@pytest.mark.parametrize(
    ("diagnostics", "summary"),
    [
        ("one\ntwo", "stage s: one"),
        ("failed at:\n  this op", "stage s: failed at: this op"),
        ("failed at:", "stage s: failed at:"),
        ("", "stage s: no reason given"),
    ],
)
def test_a_summary_is_a_line_that_says_something(diagnostics: str, summary: str) -> None:
    assert StageError("s", diagnostics).summary == summary


def test_a_flag_that_is_only_suggested_is_not_refused() -> None:
    words = "Unknown command line argument '--a-new'. Did you mean '--an-old'?"
    assert FlagError("s", words, ("--a-new=1", "--an-old")).named == ("--a-new=1",)


@pytest.mark.parametrize(
    ("how", "is_told"),
    [
        (service.OUT_OF_MEMORY, True),
        ("the compiler died of SIGKILL", True),
        ("the compiler died of SIGABRT", True),
        ("the compiler died of SIGABRT\nterminate called after 'std::bad_alloc'", True),
        ("the compiler died of SIGABRT (LLVM ERROR: out of memory)\nAllocation failed", True),
        ("the compiler died of SIGABRT\nLLVM ERROR: Failed to infer result type(s):", False),
        ("the compiler died of SIGSEGV", False),
        ("failed to legalize", False),
    ],
)
def test_the_limit_of_memory_is_told_where_memory_may_have_run_out(how: str, is_told: bool) -> None:
    told = service._with_limit(how, service.Limits(memory_bytes=3))
    assert ("it may use 3 bytes (option compile_memory_limit_bytes)" in told) == is_told

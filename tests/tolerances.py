"""Results against eager's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from npu_iree.tolerances import tolerance


@contextmanager
def _noting(what: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        error.add_note(what)
        raise


def assert_same(actual: Any, expected: Any) -> None:
    """Compare (trees of) results with eager's: values, dtypes and shapes; not orders in memory.

    Where they differ, an error notes the names under which that is."""
    if isinstance(expected, torch.Tensor):
        rtol, atol = tolerance(expected.dtype)
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
        return
    if isinstance(expected, dict):
        assert [*actual] == [*expected]
        for name in expected:
            with _noting(f"of {name!r}"):
                assert_same(actual[name], expected[name])
        return
    if isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
        return
    assert actual == expected

"""Results against eager's."""

from __future__ import annotations

from typing import Any

import torch

from npu_iree.tolerances import tolerance


def assert_same(actual: Any, expected: Any) -> None:
    """Compare (trees of) results with eager's: values, dtypes and shapes; not orders in memory."""
    if isinstance(expected, torch.Tensor):
        rtol, atol = tolerance(expected.dtype)
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
        return
    if isinstance(expected, dict):
        assert [*actual] == [*expected]
        actual, expected = [*actual.values()], [*expected.values()]
    if isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
        return
    assert actual == expected

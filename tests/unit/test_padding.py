"""Padding that takes away is eager's, and so is the error where there is less to take away."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from lowering.decompositions.padding import pad


def test_padding_that_takes_away() -> None:
    compared = 0
    for size, before, after in itertools.product(range(1, 4), range(-4, 4), range(-4, 4)):
        x = torch.randn(2, size, 3)
        amounts = [1, -2, before, after]
        try:
            expected = torch.ops.aten.constant_pad_nd.default(x, amounts, 7.0)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                pad(x, amounts, 7.0)
            continue
        assert torch.equal(pad(x, amounts, 7.0), expected)
        compared += 1
    assert compared > 60

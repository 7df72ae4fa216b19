"""Padding that takes away is eager's, also where more is taken away than there was."""

from __future__ import annotations

import itertools

import torch

from lowering.decompositions.padding import pad


def test_padding_that_takes_away() -> None:
    compared = 0
    for size, before, after in itertools.product(range(1, 4), range(-4, 4), range(-4, 4)):
        x = torch.randn(2, size, 3)
        amounts = [1, -2, before, after]
        try:
            expected = torch.ops.aten.constant_pad_nd.default(x, amounts, 7.0)
        except RuntimeError:  # less than nothing would be left
            continue
        assert torch.equal(pad(x, amounts, 7.0), expected)
        compared += 1
    assert compared > 60

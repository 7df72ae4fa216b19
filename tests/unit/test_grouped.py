"""Products of groups of rows are those of the op that mixtures of experts have."""

from __future__ import annotations

import torch
import transformers.integrations.moe  # whose ops they are
from hypothesis import given, settings
from hypothesis import strategies as st

from lowering.decompositions import grouped

ops = torch.ops.transformers
assert transformers.integrations.moe


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_groups_of_any_sizes(data: st.DataObject) -> None:
    rows, groups = data.draw(st.sampled_from([0, 1, 2, 5, 40, 300])), data.draw(st.integers(1, 6))
    cuts = st.lists(st.integers(0, rows), min_size=groups, max_size=groups)
    ends = torch.tensor(sorted(data.draw(cuts)), dtype=torch.int32)
    x, weight = torch.randn(rows, 3), torch.randn(groups, 3, 4)
    if data.draw(st.booleans()):
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    expected = ops.grouped_mm_fallback(x, weight, ends)
    torch.testing.assert_close(grouped.grouped_mm(x, weight, ends), expected)
    gradient = torch.randn(rows, 4)
    _, of_weight = ops.grouped_mm_fallback_backward(x, weight, ends, gradient)
    found = grouped.grouped_outer(x, gradient, ends)
    torch.testing.assert_close(found, of_weight, rtol=1e-4, atol=1e-4)


def test_what_is_not_finite_stays_in_its_group() -> None:
    ends, bad = torch.tensor([3, 5, 9]), float("nan")
    x, gradient, weight = torch.ones(11, 2), torch.ones(11, 4), torch.ones(3, 2, 4)
    x[4], gradient[9:], weight[1] = bad, bad, float("inf")
    assert grouped.grouped_mm(x, weight, ends).isnan().any(1).nonzero().flatten().tolist() == [4]
    sums = grouped.grouped_outer(x, gradient, ends)
    assert sums.isnan().flatten(1).any(1).tolist() == [False, True, False]


def test_few_rows_are_a_block_each_and_many_fill_theirs() -> None:
    """A block reads a matrix: two rows read two, and many read few more than there are."""
    ends = torch.arange(1, 9)

    def blocks(rows: int) -> tuple[int, int]:
        found = grouped._Blocks.of(rows, ends, grouped._SIZES, grouped._FREE)
        return found.size, len(found.owners)

    assert blocks(2) == (1, 2)
    assert blocks(256) == (16, 23)
    assert blocks(4096) == (32, 135)

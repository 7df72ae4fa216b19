"""Sizes that are products, some factors of which are not known."""

from __future__ import annotations

from lowering.stages.ir.sizes import Size, product


def test_equal_products_are_equal_in_any_order() -> None:
    a, b = Size(1, ("a",)), Size(1, ("b",))
    one, other = product([Size(3), a, b, a]), product([a, Size(3), a, b])
    assert one == other
    assert hash(one) == hash(other)
    assert product([a, b]) != product([a, a])
    assert product([Size(2), a]) != product([Size(3), a])


def test_they_are_written_in_one_order() -> None:
    """Not in that of hashes, which is another in each process: artifacts are to be the same."""
    sizes = [Size(2, (name,)) for name in "dacb"]
    assert product(sizes).factors == tuple("dacb")
    assert product(sizes).known == 16


def test_a_size_is_known_if_all_factors_are() -> None:
    assert product([Size(2), Size(5)]).number == 10
    assert product([]).number == 1
    assert product([Size(2), Size(1, ("a",))]).number is None

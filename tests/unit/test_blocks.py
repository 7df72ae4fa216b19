"""Memory for results is lent again when the last of them is gone, and kept within bounds."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from npu_iree.blocks import Block, Blocks


class Pages:
    """Memory that notes whether it was given back; its buffers are lists with their owners."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.is_released = False

    def buffer(self, owner: object) -> list[object]:
        return [owner]

    def release(self) -> None:
        self.is_released = True


class Reserved(list[Pages]):
    def __call__(self, nbytes: int) -> Any:
        if nbytes > 10_000:
            raise MemoryError
        self.append(Pages(nbytes))
        return self[-1]


@pytest.fixture
def reserved() -> Reserved:
    return Reserved()


@pytest.fixture
def blocks(reserved: Reserved) -> Blocks:
    return Blocks(reserved)


def lent(blocks: Blocks, nbytes: int) -> tuple[Block, Any]:
    loan = blocks.lend(nbytes)
    assert loan is not None
    return loan


def test_a_block_is_lent_until_the_last_result_is_gone(blocks: Blocks) -> None:
    one, result = lent(blocks, 100)
    view = result[:]
    other, _ = lent(blocks, 100)
    assert other is not one
    del result
    assert lent(blocks, 100)[0] is not one
    del view
    assert lent(blocks, 100)[0] is one


def test_the_smallest_that_fits_is_lent(blocks: Blocks) -> None:
    held = [lent(blocks, nbytes) for nbytes in (120, 110, 105)]
    large, _, small = (block for block, _ in held)
    held.clear()
    assert lent(blocks, 100)[0] is small
    assert lent(blocks, 111)[0] is large


def test_a_block_is_not_lent_to_what_needs_much_less(blocks: Blocks) -> None:
    large = lent(blocks, 100)[0]
    assert lent(blocks, 45)[0] is not large
    assert lent(blocks, 90)[0] is large


def test_no_more_is_kept_than_half_of_what_was_needed_at_once(
    blocks: Blocks, reserved: Reserved
) -> None:
    """The oldest goes first."""
    held = [lent(blocks, nbytes) for nbytes in (100, 200, 300)]
    kept = [block for block, _ in held]
    held.clear()
    kept.append(lent(blocks, 400)[0])
    assert blocks.nbytes == 900, "1000 would be more than 1.5 times 600"
    assert [pages.is_released for pages in reserved] == [True, False, False, False]
    assert kept[0] not in blocks
    assert {*kept[1:]} == {block for block in kept if block in blocks}


def test_what_is_lent_stays_whatever_it_takes(blocks: Blocks, reserved: Reserved) -> None:
    held = [lent(blocks, 100) for _ in range(20)]
    assert blocks.nbytes == 2000
    assert not any(pages.is_released for pages in reserved)
    assert len({block for block, _ in held}) == 20


def test_release_gives_back_what_is_free(blocks: Blocks, reserved: Reserved) -> None:
    kept = lent(blocks, 100)[0]
    used, result = lent(blocks, 200)
    blocks.release()
    assert [pages.is_released for pages in reserved] == [True, False]
    assert kept not in blocks
    assert used in blocks
    assert result


def test_what_cannot_be_reserved_is_left_to_the_call(blocks: Blocks) -> None:
    assert blocks.lend(20_000) is None
    assert Blocks(lambda nbytes: None).lend(100) is None, "the device has an allocator"


def test_a_block_lives_as_long_as_somebody_holds_it(blocks: Blocks) -> None:
    block, result = lent(blocks, 100)
    del block
    gc.collect()
    assert blocks.nbytes == 100
    del result
    gc.collect()
    assert blocks.nbytes == 0

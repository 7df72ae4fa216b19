"""Memory that stays is lent to one call at a time, and given back when it is not needed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from npu_iree.arenas import Arena, Arenas
from npu_iree.timeline import NOW, Timepoint, Work


class Fence:
    """A fence that the test reaches."""

    def __init__(self) -> None:
        self.is_reached, self.has_failed = False, False

    def wait(self, timeout: int | None = None) -> bool:
        if self.has_failed:
            raise RuntimeError("the call failed")
        return self.is_reached


class Reserved:
    """Notes what was reserved, and what was given back."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []
        self.released: list[int] = []

    def __call__(self, nbytes: int) -> tuple[Any, Callable[[], None]]:
        if nbytes > 1000:
            raise MemoryError
        self.nbytes.append(nbytes)
        return object(), lambda: self.released.append(nbytes)


@pytest.fixture
def reserved() -> Reserved:
    return Reserved()


@pytest.fixture
def arenas(reserved: Reserved) -> Arenas:
    return Arenas(reserved)


def lent(arenas: Arenas, nbytes: int, *points: Timepoint) -> Arena:
    arena = arenas.lend(nbytes, list(points))
    assert arena is not None
    return arena


def begun(arena: Arena, *after: Timepoint) -> tuple[Timepoint, Fence]:
    """A call that uses an arena, and its end."""
    fence = Fence()
    point = Timepoint(fence, Work("call"), after)
    arena.end_with(point)
    return point, fence


def test_one_call_at_a_time_has_an_arena(arenas: Arenas, reserved: Reserved) -> None:
    one = lent(arenas, 100)
    assert lent(arenas, 100) is not one, "lent, but not submitted"
    _, end = begun(one)
    assert not arenas.lend_again(one, [])
    end.is_reached = True
    assert arenas.lend_again(one, [])
    assert not arenas.lend_again(one, [])
    assert reserved.nbytes == [100, 100]


def test_a_call_has_the_arena_of_one_that_it_waits_for(arenas: Arenas, reserved: Reserved) -> None:
    arena = lent(arenas, 100)
    first, _ = begun(arena)
    assert arenas.lend_again(arena, [NOW, first])
    second, _ = begun(arena, first)
    assert not arenas.lend_again(arena, [first]), "it waits for the first, not for the second"
    other = Timepoint(Fence(), Work("other"), [second])
    last = Timepoint(Fence(), Work("last"), [NOW, other])
    waited_for = [last]
    assert arenas.lend(50, waited_for) is arena
    assert waited_for == [last, second], "what it waits for may need nothing of that, and be early"
    assert reserved.nbytes == [100]


def test_calls_that_wait_get_little_new_memory(arenas: Arenas, reserved: Reserved) -> None:
    """As many as one likes may be submitted; those that begin now are under way."""
    waited_for = Timepoint(Fence(), Work("other"))
    kept = [arenas.lend(100, [waited_for]) for _ in range(4)]
    assert [arena is None for arena in kept] == [False, False, True, True]
    more = [lent(arenas, 100) for _ in range(2)]
    assert reserved.nbytes == [100] * 4
    assert len({*filter(None, kept), *more}) == 4


def test_the_smallest_that_fits_is_lent(arenas: Arenas) -> None:
    large, small = lent(arenas, 500), lent(arenas, 200)
    for arena in (large, small):
        arena.end_with(NOW)
    assert lent(arenas, 100) is small
    assert lent(arenas, 100) is large
    assert arenas.nbytes == 700


def test_more_takes_the_place_of_what_is_free_and_smaller(
    arenas: Arenas, reserved: Reserved
) -> None:
    free, busy = lent(arenas, 100), lent(arenas, 200)
    free.end_with(NOW)
    begun(busy)
    more = lent(arenas, 300)
    assert reserved.released == [100]
    assert arenas.nbytes == 500
    assert not arenas.lend_again(free, [])
    more.end_with(NOW)
    assert lent(arenas, 100) is more


def test_after_a_failed_call_an_arena_is_not_lent_again(arenas: Arenas) -> None:
    arena = lent(arenas, 100)
    _, end = begun(arena)
    end.has_failed = True
    assert not arenas.lend_again(arena, [])
    assert lent(arenas, 100) is not arena
    assert arena not in arenas


def test_after_a_refused_call_an_arena_is_not_lent_again(arenas: Arenas) -> None:
    arena = lent(arenas, 100)
    arenas.give_up(arena)
    assert not arenas.lend_again(arena, [])
    assert arenas.nbytes == 0


def test_a_point_follows_what_its_history_has_near() -> None:
    far = NOW
    chain = Timepoint(Fence(), Work("first"))
    for _ in range(99):
        far, chain = chain, Timepoint(Fence(), Work("next"), [chain])
    other = Timepoint(Fence(), Work("other"))
    for points in ([other, chain], [chain, other]):
        assert Timepoint(Fence(), Work("last"), points).follows(other)
    assert chain.follows(far)
    assert not far.follows(chain)


def test_what_cannot_be_reserved_is_left_to_the_call(arenas: Arenas) -> None:
    assert arenas.lend(5000, []) is None


def test_what_is_in_use_is_not_given_back_for_one_that_waits_for_it(
    arenas: Arenas, reserved: Reserved
) -> None:
    small = lent(arenas, 100)
    point, _ = begun(small)
    lent(arenas, 200, point)
    assert reserved.released == []


def test_release_gives_back_what_is_free(arenas: Arenas, reserved: Reserved) -> None:
    free, busy = lent(arenas, 100), lent(arenas, 200)
    free.end_with(NOW)
    begun(busy)
    arenas.release()
    assert reserved.released == [100]
    assert arenas.nbytes == 200


def test_an_arena_lives_as_long_as_somebody_holds_it(arenas: Arenas) -> None:
    arena = lent(arenas, 100)
    assert arenas.nbytes == 100
    del arena
    gc.collect()
    assert arenas.nbytes == 0

"""How the rows and panels of a product are shared out among workers."""

from __future__ import annotations

from collections.abc import Sequence

_ROWS = range(128, 513)  # of a work item, if there are more, and so many divide them
ANY_ROWS = 256  # as many as those that are not known are taken for
_MOST_PANELS = 16  # of a work item
# IREE's task system hands out work items one by one while there are fewer than 8 for each worker,
# and else 8 at a time (`iree/task/tuning.h`); they are made such that these have the same to do.
_AT_A_TIME = 8
_WORKERS = (2, 4, 8)
_MOST_STACKED = 64  # matrices: how unevenly more are shared out hardly differs


def work_item(m: int, panels: int, stack: int, rows: int) -> tuple[int, int]:
    """Return how many rows and panels a worker computes at a time."""
    stack = min(stack, _MOST_STACKED)
    if m in _ROWS or not (divisors := [d for d in _ROWS if m % d == 0]):
        item_rows = -(-m // rows) * rows
    else:  # as many in each, or the last of them would have a loop of a size that is not known
        item_rows = divisors[-1]
    heights = [min(item_rows, m - top) for top in range(0, m, item_rows)]

    def uneven(item: int) -> float:
        widths = [min(item, panels - left) for left in range(0, panels, item)]
        return unevenness([h * w for _ in range(stack) for h in heights for w in widths])

    return item_rows, min(range(1, min(panels, _MOST_PANELS) + 1), key=uneven)


def unevenness(items: Sequence[int]) -> float:
    """Say how long the busiest worker works, for several numbers of them: the least is best.

    Args:
        items: how long each work item takes, in the order in which they are handed out.
    """
    return round(sum(_longest(items, w) * w / sum(items) for w in _WORKERS), 2)


def _longest(items: Sequence[int], workers: int) -> int:
    """Return what the busiest of some workers has to do."""
    share = 1 if len(items) < _AT_A_TIME * workers else _AT_A_TIME
    loads = [0] * workers
    for begin in range(0, len(items), share):
        loads[loads.index(min(loads))] += sum(items[begin : begin + share])
    return max(loads)

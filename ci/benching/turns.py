"""Who is measured when, so that none has the others to suffer from more than another."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

REST_S = 0.05


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Give names in turn, every other round backwards, with a rest before each.

    OpenMP's threads go on spinning for some 16 ms after the last kernel of PyTorch's, and would
    take the CPU from whoever is measured next.
    """
    for i in range(rounds):
        for name in names if i % 2 == 0 else reversed(names):
            time.sleep(REST_S)
            yield name

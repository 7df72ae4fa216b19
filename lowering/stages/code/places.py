"""Where pointers of device code point to: as sums of values, in numbers of what is read."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lowering.stages.ir.symbols import constant_of, maker_of


def place_of(pointer: Any) -> Counter[Any]:
    """Return where a pointer points to: how often each value counts; None for 1.

    Of `llvm.getelementptr %base[%row * 768 + %k + 5]`, it is `{base: 1, row: 768, k: 1, None: 5}`.
    """
    if maker_of(pointer) != "llvm.getelementptr" or len(pointer.owner.operands) != 2:
        return Counter({pointer: 1})
    base, index = pointer.owner.operands
    place = _sum(index)
    place[base] += 1
    return place


def stride_of(pointers: Sequence[Any]) -> int | None:
    """Return how far each is from the one before; None: not all as far, or it is not known."""
    places = [place_of(pointer) for pointer in pointers]
    steps = [_difference(after, before) for before, after in itertools.pairwise(places)]
    if not steps:
        return None
    stride = steps[0].pop(None, 0)
    others = [step for step in steps[1:] if step != {None: stride}]
    return stride if stride > 0 and not steps[0] and not others else None


def _sum(value: Any) -> Counter[Any]:
    if (number := constant_of(value)) is not None:
        return Counter({None: number})
    match maker_of(value):
        case "llvm.add":
            one, other = map(_sum, value.owner.operands)
            one.update(other)
            return one
        case "llvm.mul":
            one, factor = value.owner.operands
            if (times := constant_of(factor)) is not None:
                return Counter({key: count * times for key, count in _sum(one).items()})
    return Counter({value: 1})


def _difference(one: Counter[Any], other: Counter[Any]) -> dict[Any, int]:
    difference = Counter(one)
    difference.subtract(other)
    return {key: count for key, count in difference.items() if count}

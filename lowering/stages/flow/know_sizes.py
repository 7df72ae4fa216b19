"""Have device programs know the sizes that they are given, where they compute them from numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowering.stages.ir.device_programs import (
    EXECUTABLE,
    dispatches_of,
    functions_of,
    segments_of,
)
from lowering.stages.ir.sizes import ORDINAL
from lowering.stages.ir.symbols import inside, maker_of

_CAST = "arith.index_cast"


def know_sizes(module: Any) -> None:
    """Take a size that a device program casts from a number from what counts its work items.

    IREE moves the arithmetic of a size that was a number of the user's, as in a view, into the
    programs that read it, beside the size itself, by which it counts their work items. It then does
    not see that the two are one ("failed to resolve workgroup count hint in terms of workload
    ordinals"): `x * view(linear(y), [b, s, 2, 256])[:, :, 1]` of any sizes was refused.

    Before: flow.dispatch @a[%size](%number, %size, ...)       with %size = index_cast(%number)
            func.func @a(%n: i64, %s: index, ...): %0 = workload.ordinal %s; %1 = index_cast(%n)
    After:  the same, and %0 where %1 was read

    Args:
        module: one in flow, its dispatches formed.
    """
    for executable in inside(module, EXECUTABLE):
        for function in functions_of(executable):
            block = function.regions[0].blocks[0]
            casts = [op for op in block.operations if op.operation.name == _CAST]
            ordinals = [op for op in block.operations if op.operation.name == ORDINAL]
            sizes = {
                op.operands[0].arg_number: op for op in ordinals if not maker_of(op.operands[0])
            }
            if casts and sizes:
                _know(casts, sizes, dispatches_of(module, executable))


def _know(casts: Sequence[Any], sizes: Mapping[int, Any], dispatches: Sequence[Any]) -> None:
    """Replace the casts that are one of the sizes wherever the program is dispatched."""
    same = [_same(casts, sizes, segments_of(dispatch)[1]) for dispatch in dispatches]
    for cast, *numbers in zip(casts, *same, strict=True):
        if len(set(numbers)) == 1 and numbers[0] is not None:
            cast.results[0].replace_all_uses_with(sizes[numbers[0]].results[0])


def _same(casts: Sequence[Any], sizes: Mapping[int, Any], given: Sequence[Any]) -> list[int | None]:
    """Return for each cast which argument it is; None if it is not one of the sizes."""
    values = _Values(given)
    outside = {values.number(given[position]): position for position in sizes}
    return [outside.get(values.number(cast.results[0], is_inside=True)) for cast in casts]


class _Values:
    """Numbers of values, of the host and of a function that is dispatched: equal ones are equal."""

    def __init__(self, given: Sequence[Any]) -> None:
        """Begin with what each argument of the function is given."""
        self._given = given
        self._numbers: dict[Any, int] = {}  # of what an op computes of numbers, or of a value
        self._known: dict[tuple[bool, Any], int] = {}

    def number(self, value: Any, *, is_inside: bool = False) -> int:
        """Return the number of a value of the host, or of the function."""
        found = self._known.get((is_inside, value))
        if found is None:
            found = self._known[is_inside, value] = self._made(value, is_inside=is_inside)
        return found

    def _made(self, value: Any, *, is_inside: bool) -> int:
        maker = maker_of(value)
        if not maker and is_inside and value.arg_number < len(self._given):
            return self.number(self._given[value.arg_number])
        what: Any = (is_inside, value)
        if maker.startswith("arith.") or (is_inside and maker == ORDINAL):
            operands = [self.number(v, is_inside=is_inside) for v in value.owner.operands]
            if maker == ORDINAL:
                return operands[0]
            given = value.owner.attributes
            attributes = ", ".join(f"{name} = {given[name]}" for name in given)
            what = (maker, attributes, str(value.type), *operands)
        return self._numbers.setdefault(what, len(self._numbers))

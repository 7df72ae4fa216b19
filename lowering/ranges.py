"""What an exported program takes for granted of its sizes: their ranges, and how they relate."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram

from lowering.arithmetic import can_evaluate

_RELATIONS = (sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)


def symbol_ranges(program: ExportedProgram) -> dict[str, tuple[int, int | None]]:
    """Return the least and the largest value of each symbol (None: no limit)."""
    limits, numbers = program.range_constraints.items(), _numbers(program)
    return {str(s): _limits(r, s in numbers) for s, r in limits if isinstance(s, sympy.Symbol)}


def guards_of(program: ExportedProgram) -> tuple[str, ...]:
    """Return what must be true of the symbols beside their ranges, e.g. `Eq(Mod(s0, 2), 0)`.

    What only tells sizes of 0, 1 and 2 from one another is left out, as of a range.
    """
    values = [n.meta.get("val") for n in program.graph.find_nodes(op="placeholder")]
    modes = [v.fake_mode for v in values if isinstance(v, torch._subclasses.FakeTensor)]
    environment = modes[0].shape_env if modes else None
    if environment is None:
        return ()
    names, numbers = {str(s) for s in program.range_constraints}, _numbers(program)
    found: dict[str, None] = {}
    for guard in environment.guards:
        expression = guard.expr.xreplace(environment.replacements)
        if _is_telling(expression, numbers) and can_evaluate(str(expression), names):
            found[str(expression)] = None
    return tuple(found)


def _numbers(program: ExportedProgram) -> set[Any]:
    """Return the symbols that are arguments themselves, not sizes."""
    values = (n.meta.get("val") for n in program.graph.find_nodes(op="placeholder"))
    return {v.node.expr for v in values if isinstance(v, torch.SymInt)}


def _is_telling(guard: Any, numbers: Set[Any]) -> bool:
    if not isinstance(guard, _RELATIONS):
        return False
    is_of_sizes = numbers.isdisjoint(guard.free_symbols)
    is_bound = any(side.is_Integer and side <= 2 for side in (guard.lhs, guard.rhs))
    return isinstance(guard, sympy.Eq) or not (is_of_sizes and is_bound)


def _limits(limits: Any, is_number: bool) -> tuple[int, int | None]:
    """Return a symbol's range; what is as good as unlimited is None.

    PyTorch says "at least 2" of every size that it has not seen to be 1, since it would trace 1
    apart; what it has traced is right for 1 too: nothing is broadcast along a size of that name.
    """
    low, high = (int(end) if end.is_Integer else None for end in (limits.lower, limits.upper))
    least = 1 if low == 2 and not is_number else max(0, low or 0)
    return least, high if high is None or high < 2**62 else None
